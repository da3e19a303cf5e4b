package trinitymq

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"io"
	"math"
)

const maxDimensions = 16

// Tensor is an array of numbers in row-major order.
type Tensor struct {
	// DType is the element type by torch's name, such as int32, float32, bfloat16 or bool.
	DType string
	// Shape is empty for a single number.
	Shape []int
	// Data is a []int8 to []int64, []uint8 to []uint64, []float32, []float64 or []bool. float16, bfloat16 and the two
	// float8 types, which Go lacks, are widened to []float32 without loss. Tensors of one body share memory.
	Data any
}

// Array is a Tensor that was a numpy array; in documents only.
type Array struct{ *Tensor }

// slab is a concatenated tensor that can be cut.
type slab interface{ cut(from, to int) any }

type slabOf[T any] []T

func (s slabOf[T]) cut(from, to int) any { return []T(s[from:to:to]) }

type dtype struct {
	name string
	size int
	read func(data []byte) (slab, error)
}

// reader makes the reader of a type whose elements convert makes of size bytes each.
func reader[T any](size int, convert func(data []byte) T) func([]byte) (slab, error) {
	return func(data []byte) (slab, error) {
		values := make(slabOf[T], len(data)/size)
		for number := range values {
			values[number] = convert(data[number*size:])
		}
		return values, nil
	}
}

func readBools(data []byte) (slab, error) {
	values := make(slabOf[bool], len(data))
	for number, value := range data {
		if value > 1 {
			return nil, decodeError("a boolean is %d, wanted 0 or 1", value)
		}
		values[number] = value == 1
	}
	return values, nil
}

var le = binary.LittleEndian

// dtypes are the element types by safetensors' names.
var dtypes = map[string]dtype{
	"F64":     {"float64", 8, reader(8, func(b []byte) float64 { return math.Float64frombits(le.Uint64(b)) })},
	"F32":     {"float32", 4, reader(4, func(b []byte) float32 { return math.Float32frombits(le.Uint32(b)) })},
	"F16":     {"float16", 2, reader(2, func(b []byte) float32 { return float16(le.Uint16(b)) })},
	"BF16":    {"bfloat16", 2, reader(2, func(b []byte) float32 { return math.Float32frombits(uint32(le.Uint16(b)) << 16) })},
	"F8_E4M3": {"float8_e4m3fn", 1, reader(1, func(b []byte) float32 { return e4m3(b[0]) })},
	"F8_E5M2": {"float8_e5m2", 1, reader(1, func(b []byte) float32 { return float16(uint16(b[0]) << 8) })},
	"I64":     {"int64", 8, reader(8, func(b []byte) int64 { return int64(le.Uint64(b)) })},
	"I32":     {"int32", 4, reader(4, func(b []byte) int32 { return int32(le.Uint32(b)) })},
	"I16":     {"int16", 2, reader(2, func(b []byte) int16 { return int16(le.Uint16(b)) })},
	"I8":      {"int8", 1, reader(1, func(b []byte) int8 { return int8(b[0]) })},
	"U64":     {"uint64", 8, reader(8, func(b []byte) uint64 { return le.Uint64(b) })},
	"U32":     {"uint32", 4, reader(4, func(b []byte) uint32 { return le.Uint32(b) })},
	"U16":     {"uint16", 2, reader(2, func(b []byte) uint16 { return le.Uint16(b) })},
	"U8":      {"uint8", 1, reader(1, func(b []byte) uint8 { return b[0] })},
	"BOOL":    {"bool", 1, readBools},
}

// float16 is 1 sign, 5 exponent and 10 fraction bits; e5m2 is its upper byte.
func float16(bits uint16) float32 {
	sign, exponent, fraction := 1.0, int(bits>>10&31), float64(bits&1023)
	if bits>>15 == 1 {
		sign = -1
	}
	switch {
	case exponent == 31 && fraction == 0:
		return float32(math.Inf(int(sign)))
	case exponent == 31:
		return float32(math.NaN())
	case exponent == 0:
		return float32(math.Copysign(math.Ldexp(fraction, -24), sign))
	}
	return float32(sign * math.Ldexp(1024+fraction, exponent-25))
}

// e4m3 is 1 sign, 4 exponent and 3 fraction bits, without infinities.
func e4m3(bits uint8) float32 {
	sign, exponent, fraction := 1.0, int(bits>>3&15), float64(bits&7)
	if bits>>7 == 1 {
		sign = -1
	}
	switch {
	case bits&127 == 127:
		return float32(math.NaN())
	case exponent == 0:
		return float32(math.Copysign(math.Ldexp(fraction, -9), sign))
	}
	return float32(sign * math.Ldexp(8+fraction, exponent-10))
}

// entry is one tensor of the tail.
type entry struct {
	name   string
	dtype  string
	shape  []int
	values slab
}

// readTail returns the tensors of a safetensors blob, which must cover it in order and without gaps.
func readTail(blob []byte) ([]entry, error) {
	if len(blob) < 8 {
		return nil, decodeError("tail: %d bytes, wanted a safetensors blob", len(blob))
	}
	size := le.Uint64(blob)
	if size > uint64(len(blob)-8) {
		return nil, decodeError("tail: a header of %d bytes in %d", size, len(blob))
	}
	data := blob[8+size:]
	from := json.NewDecoder(bytes.NewReader(blob[8 : 8+size]))
	if token, err := from.Token(); err != nil || token != json.Delim('{') {
		return nil, decodeError("tail: the safetensors header is no JSON map (%v)", err)
	}
	var entries []entry
	covered, known := 0, make(map[string]bool)
	for from.More() {
		name, err := from.Token()
		if err != nil {
			return nil, decodeError("tail: the safetensors header is no JSON: %v", err)
		}
		one := entry{name: name.(string)} // in a map More has seen a key, and keys are texts
		if known[one.name] {
			return nil, decodeError("tail: entry %s comes twice", short(one.name))
		}
		known[one.name] = true
		end, err := one.read(from, data, covered)
		if err != nil {
			return nil, err
		}
		covered = end
		entries = append(entries, one)
	}
	if _, err := from.Token(); err != nil {
		return nil, decodeError("tail: the safetensors header is no JSON: %v", err)
	}
	if _, err := from.Token(); err != io.EOF {
		return nil, decodeError("tail: something follows the safetensors header")
	}
	if covered != len(data) {
		return nil, decodeError("tail: %d bytes belong to no tensor", len(data)-covered)
	}
	return entries, nil
}

// read fills the entry from the header and the data, which begins where the entry before ended, and returns its end.
func (e *entry) read(from *json.Decoder, data []byte, covered int) (int, error) {
	var said struct {
		DType   string  `json:"dtype"`
		Shape   []int   `json:"shape"`
		Offsets []int64 `json:"data_offsets"`
	}
	if err := from.Decode(&said); err != nil {
		return 0, decodeError("tail: entry %s: %v", short(e.name), err)
	}
	kind, known := dtypes[said.DType]
	if !known || said.Shape == nil || len(said.Shape) > maxDimensions || len(said.Offsets) != 2 {
		return 0, decodeError("tail: entry %s, wanted a known dtype, shape and data_offsets", short(e.name))
	}
	count, limit := 1, len(data)-covered
	for _, size := range said.Shape {
		if size < 0 || size > math.MaxInt32 {
			return 0, decodeError("tail: entry %s has shape %v", short(e.name), said.Shape)
		}
		if size != 0 && count > limit/size {
			count = limit + 1 // too many, unless another size is 0
		} else {
			count *= size
		}
	}
	for _, size := range said.Shape {
		if size == 0 {
			count = 0
		}
	}
	end := int64(covered) + int64(count)*int64(kind.size)
	if said.Offsets[0] != int64(covered) || said.Offsets[1] != end || end > int64(len(data)) {
		return 0, decodeError("tail: entry %s of %v %s at %v does not fit the %d bytes left",
			short(e.name), said.Shape, said.DType, said.Offsets, limit)
	}
	values, err := kind.read(data[covered:end])
	if err != nil {
		return 0, decodeError("tail: entry %s: %v", short(e.name), err)
	}
	e.dtype, e.shape, e.values = kind.name, said.Shape, values
	return int(end), nil
}
