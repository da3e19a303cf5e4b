package trinitymq

import (
	"encoding/binary"
	"hash/crc32"
	"sync"

	"github.com/klauspost/compress/zstd"
)

// The frame of an experience body, little-endian: magic, version u8, flags u8, zero u16, CRC-32C of everything after it,
// bytes of the head u32, bytes of the tail u64; then the head, padded to 8 bytes, and the tail.
const (
	frameMagic   = "TMQX"
	frameVersion = 1
	frameSize    = 24
	checkedFrom  = 12
	flagZstd     = 1

	// A compressed body may claim this many times its bytes, and this much in any case.
	maxExpansion   = 32
	expansionFloor = 64 << 10
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// openFrame returns head and tail of a body after all checks that need no parsing.
func openFrame(body []byte) (head, tail []byte, err error) {
	if len(body) < frameSize {
		return nil, nil, decodeError("%d bytes, wanted an experience body of at least %d", len(body), frameSize)
	}
	if string(body[:4]) != frameMagic {
		return nil, nil, decodeError("the body starts with %q, wanted %q: no experience body", body[:4], frameMagic)
	}
	if body[4] != frameVersion {
		return nil, nil, decodeError("experience body of version %d, this client reads version %d", body[4], frameVersion)
	}
	flags, zero := body[5], binary.LittleEndian.Uint16(body[6:])
	if flags&^flagZstd != 0 || zero != 0 {
		return nil, nil, decodeError("unknown flags %#x, %#x, wanted 0 or %d, and 0", flags, zero, flagZstd)
	}
	if found, wanted := crc32.Checksum(body[checkedFrom:], castagnoli), binary.LittleEndian.Uint32(body[8:]); found != wanted {
		return nil, nil, decodeError("checksum %#08x, wanted %#08x: the body was damaged on its way", found, wanted)
	}
	headSize, tailSize := uint64(binary.LittleEndian.Uint32(body[12:])), binary.LittleEndian.Uint64(body[16:])
	tailStart := (headSize + 7) &^ 7
	if tailSize > 1<<62 {
		return nil, nil, decodeError("a tail of %d bytes", tailSize)
	}
	content := body[frameSize:]
	if flags&flagZstd != 0 {
		if content, err = inflate(content, tailStart+tailSize); err != nil {
			return nil, nil, err
		}
	}
	if uint64(len(content)) != tailStart+tailSize {
		return nil, nil, decodeError("%d bytes after the frame, wanted %d: head of %d, tail of %d; cut short or followed by "+
			"something else", len(content), tailStart+tailSize, headSize, tailSize)
	}
	return content[:headSize], content[tailStart:], nil
}

var decompressor struct {
	once   sync.Once
	reader *zstd.Decoder
	err    error
}

// inflate returns the content of one zstd frame that states its size, which must be the one wanted.
func inflate(data []byte, wanted uint64) ([]byte, error) {
	var header zstd.Header
	if err := header.Decode(data); err != nil || header.Skippable {
		return nil, decodeError("the compressed part is no zstd frame: %v", err)
	}
	if !header.HasFCS || header.FrameContentSize != wanted {
		return nil, decodeError("the zstd frame states %d bytes, wanted %d", header.FrameContentSize, wanted)
	}
	if limit := uint64(len(data))*maxExpansion + expansionFloor; wanted > limit {
		return nil, decodeError("%d compressed bytes claim %d, wanted at most %d", len(data), wanted, limit)
	}
	decompressor.once.Do(func() {
		decompressor.reader, decompressor.err = zstd.NewReader(nil, zstd.WithDecodeAllCapLimit(true))
	})
	if decompressor.err != nil {
		return nil, decompressor.err
	}
	content, err := decompressor.reader.DecodeAll(data, make([]byte, 0, wanted))
	if err != nil {
		return nil, decodeError("zstd: %v", err)
	}
	return content, nil
}
