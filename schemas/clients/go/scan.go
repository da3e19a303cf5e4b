package trinitymq

import "unicode/utf8"

const (
	// maxNesting is how many containers deep a body may be.
	maxNesting = 64
	// maxContainers is how many lists and maps a body may hold: each takes far more memory than its one byte.
	maxContainers = 1 << 18
)

type mpKind uint8

const (
	mpScalar mpKind = iota
	mpText
	mpArray
	mpMap
	mpInvalid
)

// mpShape says what follows a msgpack value's first byte: a length field of width bytes, and fixed bytes (or items) more.
type mpShape struct {
	kind         mpKind
	width, fixed uint8
}

var mpTable = func() (table [256]mpShape) {
	set := func(first, last int, kind mpKind, width, fixed uint8) {
		for code := first; code <= last; code++ {
			table[code] = mpShape{kind, width, fixed}
		}
	}
	for code := 0; code < 16; code++ {
		set(0x80+code, 0x80+code, mpMap, 0, uint8(code))
		set(0x90+code, 0x90+code, mpArray, 0, uint8(code))
	}
	for code := 0; code < 32; code++ {
		set(0xa0+code, 0xa0+code, mpText, 0, uint8(code))
	}
	set(0xc1, 0xc1, mpInvalid, 0, 0)
	for number, width := range []uint8{1, 2, 4} {
		set(0xc4+number, 0xc4+number, mpScalar, width, 0) // bin
		set(0xc7+number, 0xc7+number, mpScalar, width, 1) // ext: one byte more, its type
		set(0xd9+number, 0xd9+number, mpText, width, 0)
	}
	set(0xca, 0xca, mpScalar, 0, 4)
	set(0xcb, 0xcb, mpScalar, 0, 8)
	for number, size := range []uint8{1, 2, 4, 8} {
		set(0xcc+number, 0xcc+number, mpScalar, 0, size)
		set(0xd0+number, 0xd0+number, mpScalar, 0, size)
	}
	for number, size := range []uint8{1, 2, 4, 8, 16} {
		set(0xd4+number, 0xd4+number, mpScalar, 0, size+1)
	}
	set(0xdc, 0xdc, mpArray, 2, 0)
	set(0xdd, 0xdd, mpArray, 4, 0)
	set(0xde, 0xde, mpMap, 2, 0)
	set(0xdf, 0xdf, mpMap, 4, 0)
	return table
}()

// scan checks that data is exactly one msgpack value: no deeper than maxNesting, no length beyond what is there, all
// texts UTF-8, and no more containers than are left, of which it takes its own. The msgpack library allocates what a length claims before it reads the items, and recurses without limit;
// what passed here is safe to give to it.
func scan(data []byte, containers *int) error {
	var above []uint64 // items still to come on the levels above
	left, position := uint64(1), 0
	for left > 0 || len(above) > 0 {
		if left == 0 {
			left, above = above[len(above)-1], above[:len(above)-1]
			continue
		}
		if position >= len(data) {
			return decodeError("msgpack cut short at byte %d", position)
		}
		shape := mpTable[data[position]]
		if shape.kind == mpInvalid {
			return decodeError("byte %#x at %d is no msgpack", data[position], position)
		}
		position++
		left--
		length := uint64(0)
		for width := int(shape.width); width > 0; width-- {
			if position >= len(data) {
				return decodeError("msgpack cut short at byte %d", position)
			}
			length = length<<8 | uint64(data[position])
			position++
		}
		length += uint64(shape.fixed)
		if shape.kind == mpMap {
			length *= 2
		}
		if length > uint64(len(data)-position) {
			return decodeError("a length of %d at byte %d, %d bytes are left", length, position, len(data)-position)
		}
		if shape.kind == mpArray || shape.kind == mpMap {
			if len(above) >= maxNesting {
				return decodeError("nested deeper than %d levels", maxNesting)
			}
			if *containers--; *containers < 0 {
				return decodeError("more than %d lists and maps in one body", maxContainers)
			}
			above = append(above, left)
			left = length
			continue
		}
		end := position + int(length)
		if shape.kind == mpText && !utf8.Valid(data[position:end]) {
			return decodeError("the text at byte %d is not UTF-8", position)
		}
		position = end
	}
	if position != len(data) {
		return decodeError("%d bytes after the msgpack value", len(data)-position)
	}
	return nil
}
