package trinitymq

import (
	"bytes"
	"encoding/binary"
	"errors"
	"hash/crc32"
	"math/rand"
	"reflect"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/klauspost/compress/zstd"
)

// sealed returns body with the checksum that its bytes have.
func sealed(body []byte) []byte {
	if len(body) >= frameSize {
		binary.LittleEndian.PutUint32(body[8:], crc32.Checksum(body[checkedFrom:], castagnoli))
	}
	return body
}

func compressed(t testing.TB, body []byte, content []byte) []byte {
	t.Helper()
	writer, err := zstd.NewWriter(nil, zstd.WithSingleSegment(true))
	if err != nil {
		t.Fatal(err)
	}
	defer writer.Close()
	packed := writer.EncodeAll(content, append([]byte{}, body[:frameSize]...))
	packed[5] = flagZstd
	return sealed(packed)
}

func TestCompressedBodies(t *testing.T) {
	for name, golden := range goldens(t, "experiences/v1.*.tmqx") {
		if golden[0][5] != 0 {
			continue
		}
		want, err := DecodeExperiences(golden[0])
		if err != nil {
			t.Fatal(err)
		}
		got, err := DecodeExperiences(compressed(t, golden[0], golden[0][frameSize:]))
		if err != nil || !bytes.Equal(texts(t, got), texts(t, want)) {
			t.Errorf("%s: %v, got %+v", name, err, got)
		}
		if _, err := DecodeExperiences(compressed(t, golden[0], golden[0][frameSize+8:])); !errors.Is(err, ErrDecode) {
			t.Errorf("%s with a zstd frame that is too short: %v", name, err)
		}
	}
}

func texts(t testing.TB, batch *Batch) []byte {
	var all []byte
	for number := range batch.Experiences {
		all = append(all, asJSON(t, &batch.Experiences[number])...)
	}
	return all
}

func TestZstdBombIsRefusedBeforeItIsUnpacked(t *testing.T) {
	body := make([]byte, frameSize)
	copy(body, frameMagic)
	body[4] = frameVersion
	size := 64 << 20
	binary.LittleEndian.PutUint64(body[16:], uint64(size))
	bomb := compressed(t, body, make([]byte, size))
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	_, err := DecodeExperiences(bomb)
	runtime.ReadMemStats(&after)
	if !errors.Is(err, ErrDecode) || !strings.Contains(err.Error(), "claim") {
		t.Errorf("%d bytes: %v", len(bomb), err)
	}
	if made := after.TotalAlloc - before.TotalAlloc; made > 1<<20 {
		t.Errorf("%d bytes allocated", made)
	}
}

func TestDamagedBodiesAreRefused(t *testing.T) {
	random := rand.New(rand.NewSource(1))
	for name, golden := range goldens(t, "experiences/v1.*.tmqx") {
		for round := 0; round < 300; round++ {
			body := append([]byte{}, golden[0]...)
			body[random.Intn(len(body))] ^= 1 << random.Intn(8)
			if _, err := DecodeExperiences(body); !errors.Is(err, ErrDecode) {
				t.Fatalf("%s with a flipped bit: %v", name, err)
			}
			if _, err := DecodeExperiences(golden[0][:random.Intn(len(golden[0]))]); !errors.Is(err, ErrDecode) {
				t.Fatalf("%s cut short: %v", name, err)
			}
		}
	}
}

// mutated changes a body in one of the ways that get past a checksum which is made again.
func mutated(random *rand.Rand, body []byte) []byte {
	body = append([]byte{}, body...)
	for changes := 1 + random.Intn(4); changes > 0; changes-- {
		at := random.Intn(len(body))
		switch random.Intn(5) {
		case 0:
			body[at] ^= 1 << random.Intn(8)
		case 1:
			body[at] = []byte{0, 1, 0x7f, 0x80, 0xc0, 0xc1, 0xdd, 0xdf, 0xff}[random.Intn(9)]
		case 2:
			body = append(body[:at], body[at+random.Intn(len(body)-at):]...)
		case 3:
			piece := append([]byte{}, body[at:at+random.Intn(len(body)-at)]...)
			body = append(body[:at], append(piece, body[at:]...)...)
		case 4:
			for end := at + 4; at < end && at < len(body); at++ {
				body[at] = 0xff
			}
		}
		if len(body) == 0 {
			return []byte{0}
		}
	}
	return body
}

func TestMutatedExperiences(t *testing.T) {
	random := rand.New(rand.NewSource(2))
	bodies := goldens(t, "experiences/v1.*.tmqx")
	refused, rounds, slowest := 0, 0, time.Duration(0)
	for name, golden := range bodies {
		if golden[0][5] != 0 {
			continue
		}
		for round := 0; round < 1500; round++ {
			content := mutated(random, golden[0][frameSize:])
			body := append(append([]byte{}, golden[0][:frameSize]...), content...)
			if random.Intn(2) == 0 { // let the frame fit, so that what is behind it is reached
				headSize := (int(binary.LittleEndian.Uint32(body[12:])) + 7) &^ 7
				if headSize <= len(content) {
					binary.LittleEndian.PutUint64(body[16:], uint64(len(content)-headSize))
				}
			}
			started := time.Now()
			batch, err := DecodeExperiences(sealed(body))
			if spent := time.Since(started); spent > slowest {
				slowest = spent
			}
			rounds++
			if err != nil {
				if refused++; !errors.Is(err, ErrDecode) {
					t.Fatalf("%s: %v", name, err)
				}
				continue
			}
			texts(t, batch) // what was accepted can be used
		}
	}
	if refused < rounds/2 || slowest > time.Second {
		t.Errorf("%d of %d refused, slowest %v", refused, rounds, slowest)
	}
}

func TestMutatedOutcomes(t *testing.T) {
	random := rand.New(rand.NewSource(3))
	for name, golden := range goldens(t, "control/*.msgpack") {
		for round := 0; round < 300; round++ {
			body := mutated(random, golden[0])
			if _, err := DecodeOutcome(body, ContentTypeMsgpack); err != nil && !errors.Is(err, ErrDecode) {
				t.Fatalf("%s: %v", name, err)
			}
			if _, err := DecodeReference(body); err != nil && !errors.Is(err, ErrDecode) {
				t.Fatalf("%s: %v", name, err)
			}
			if _, err := DecodeOutcome(mutated(random, golden[1]), ContentTypeJSON); err != nil && !errors.Is(err, ErrDecode) {
				t.Fatalf("%s: %v", name, err)
			}
		}
	}
}

func TestOtherKindsAreNoOutcome(t *testing.T) {
	for name, golden := range goldens(t, "control/*.msgpack") {
		_, err := DecodeOutcome(golden[0], ContentTypeMsgpack)
		if is := strings.HasPrefix(name, KindOutcome+"."); (err == nil) != is {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestScan(t *testing.T) {
	nested := append(bytes.Repeat([]byte{0x91}, maxNesting), 0xc0)
	scan := func(body []byte) error {
		containers := maxContainers
		return scan(body, &containers)
	}
	if err := scan(nested); err != nil {
		t.Errorf("%d levels: %v", maxNesting, err)
	}
	for name, body := range map[string][]byte{
		"nothing":          {},
		"one level more":   append([]byte{0x91}, nested...),
		"a million levels": bytes.Repeat([]byte{0x91}, 1<<20),
		"a huge array":     {0xdd, 0xff, 0xff, 0xff, 0xff},
		"a huge map":       {0xdf, 0xff, 0xff, 0xff, 0xff},
		"a huge text":      {0xdb, 0xff, 0xff, 0xff, 0xff, 'a'},
		"too many maps":    append([]byte{0xdd, 0, 4, 0, 0}, bytes.Repeat([]byte{0x80}, maxContainers)...),
		"two values":       {0xc0, 0xc0},
		"the unused code":  {0xc1},
		"a bad text":       {0xa1, 0xff},
		"half a length":    {0xda, 0},
	} {
		if err := scan(body); !errors.Is(err, ErrDecode) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestSmallFloats(t *testing.T) {
	for bits, want := range map[uint16]float32{
		0: 0, 1: 5.9604645e-08, 0x03ff: 6.097555e-05, 0x0400: 6.1035156e-05, 0x3c00: 1, 0xc000: -2, 0x7bff: 65504, 0x3555: 0.33325195,
	} {
		if got := float16(bits); got != want {
			t.Errorf("float16 %#x is %v, wanted %v", bits, got, want)
		}
	}
	for bits, want := range map[uint8]float32{0: 0, 1: 0.001953125, 7: 0.013671875, 8: 0.015625, 0x38: 1, 0x7e: 448, 0xfe: -448} {
		if got := e4m3(bits); got != want {
			t.Errorf("e4m3 %#x is %v, wanted %v", bits, got, want)
		}
	}
	if nan := []float32{float16(0x7e00), e4m3(0x7f), e4m3(0xff)}; nan[0] == nan[0] || nan[1] == nan[1] || nan[2] == nan[2] {
		t.Errorf("%v, wanted no numbers", nan)
	}
}

func TestUnpackedNumbers(t *testing.T) {
	got, err := unpack([]byte{0x94, 0xcc, 0xff, 0xcf, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xe0, 0xca, 0x3f, 0x80, 0, 0}, noExtensions)
	if want := []any{int64(255), ^uint64(0), int64(-32), 1.0}; err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("%#v, %v, wanted %#v", got, err, want)
	}
}
