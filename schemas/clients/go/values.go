package trinitymq

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math"
	"time"

	"github.com/vmihailenco/msgpack/v5"
	"github.com/vmihailenco/msgpack/v5/msgpcode"
)

// extension makes a value of a msgpack extension's payload.
type extension func(code int8, data []byte) (any, error)

func noExtensions(code int8, data []byte) (any, error) {
	return nil, decodeError("msgpack extension %d of %d bytes where none belongs", code, len(data))
}

// unpack returns the one value in data as nil, bool, int64 (uint64 where it does not fit), float64, string, []byte,
// []any, map[string]any, time.Time or what extensions give.
func unpack(data []byte, extensions extension) (any, error) {
	containers := maxContainers
	return unpackSome(data, extensions, &containers)
}

// unpackSome is unpack for one of several values of a body, which share the number of containers they may hold.
func unpackSome(data []byte, extensions extension, containers *int) (any, error) {
	if err := scan(data, containers); err != nil {
		return nil, err
	}
	return readValue(msgpack.NewDecoder(bytes.NewReader(data)), extensions)
}

// readValue is the part of unpack after the scan.
func readValue(from *msgpack.Decoder, extensions extension) (any, error) {
	code, err := from.PeekCode()
	if err != nil {
		return nil, decodeError("msgpack: %v", err)
	}
	switch {
	case msgpcode.IsFixedMap(code) || code == msgpcode.Map16 || code == msgpcode.Map32:
		return readMap(from, extensions)
	case msgpcode.IsFixedArray(code) || code == msgpcode.Array16 || code == msgpcode.Array32:
		return readArray(from, extensions)
	case msgpcode.IsExt(code):
		return readExtension(from, extensions)
	}
	value, err := from.DecodeInterface()
	if err != nil {
		return nil, decodeError("msgpack: %v", err)
	}
	return plain(value), nil
}

func readMap(from *msgpack.Decoder, extensions extension) (any, error) {
	size, err := from.DecodeMapLen()
	if err != nil {
		return nil, decodeError("msgpack: %v", err)
	}
	found := make(map[string]any, size)
	for number := 0; number < size; number++ {
		code, err := from.PeekCode()
		if err != nil || !msgpcode.IsString(code) {
			return nil, decodeError("a map's key is no text")
		}
		key, err := from.DecodeString()
		if err != nil {
			return nil, decodeError("msgpack: %v", err)
		}
		if _, twice := found[key]; twice {
			return nil, decodeError("the key %s comes twice in a map", short(key))
		}
		if found[key], err = readValue(from, extensions); err != nil {
			return nil, err
		}
	}
	return found, nil
}

func readArray(from *msgpack.Decoder, extensions extension) (any, error) {
	size, err := from.DecodeArrayLen()
	if err != nil {
		return nil, decodeError("msgpack: %v", err)
	}
	found := make([]any, size)
	for number := range found {
		if found[number], err = readValue(from, extensions); err != nil {
			return nil, err
		}
	}
	return found, nil
}

func readExtension(from *msgpack.Decoder, extensions extension) (any, error) {
	code, size, err := from.DecodeExtHeader()
	if err != nil {
		return nil, decodeError("msgpack: %v", err)
	}
	data := make([]byte, size)
	if err := from.ReadFull(data); err != nil {
		return nil, decodeError("msgpack: %v", err)
	}
	if code == -1 {
		return timestamp(data)
	}
	return extensions(code, data)
}

// timestamp reads msgpack's own extension for times, in its three widths.
func timestamp(data []byte) (time.Time, error) {
	var seconds int64
	var nanoseconds uint64
	switch len(data) {
	case 4:
		seconds = int64(binary.BigEndian.Uint32(data))
	case 8:
		both := binary.BigEndian.Uint64(data)
		seconds, nanoseconds = int64(both&(1<<34-1)), both>>34
	case 12:
		seconds, nanoseconds = int64(binary.BigEndian.Uint64(data[4:])), uint64(binary.BigEndian.Uint32(data))
	default:
		return time.Time{}, decodeError("a timestamp of %d bytes", len(data))
	}
	if nanoseconds >= 1e9 {
		return time.Time{}, decodeError("a timestamp with %d nanoseconds", nanoseconds)
	}
	return time.Unix(seconds, int64(nanoseconds)).UTC(), nil
}

// plain widens the many number types of the msgpack library.
func plain(value any) any {
	switch value := value.(type) {
	case int8:
		return int64(value)
	case int16:
		return int64(value)
	case int32:
		return int64(value)
	case uint8:
		return int64(value)
	case uint16:
		return int64(value)
	case uint32:
		return int64(value)
	case uint64:
		if value <= math.MaxInt64 {
			return int64(value)
		}
	case float32:
		return float64(value)
	}
	return value
}

// short returns a value for an error message.
func short(value any) string {
	switch value := value.(type) {
	case []byte:
		return fmt.Sprintf("%d bytes", len(value))
	case map[string]any:
		return fmt.Sprintf("a map of %d", len(value))
	case []any:
		return fmt.Sprintf("a list of %d", len(value))
	case string:
		if len(value) > 60 {
			return fmt.Sprintf("%.60q... (%d bytes)", value, len(value))
		}
		return fmt.Sprintf("%q", value)
	}
	return fmt.Sprint(value)
}
