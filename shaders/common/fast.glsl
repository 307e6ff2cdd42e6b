// The contract of `fast`: an answer has the same bits alone, batched, in chunks, from the cache, and guessed
// (docs/architecture.md, "The contract of fast"). CPU twin: tests/support/reference.rs.
//
// Activations [rows, cols] are int8, in blocks of BLOCK_COLS columns of one row, for every kind of matrix:
//
//   x       [2][ceil(cols/32)][rows, padded][32]  q = x / scale, rounded to even, -127..127; 0 beyond the columns
//   scales  [2][ceil(cols/32)][rows, padded] of (f32 scale, i32 sums): the sum of the first 16 q in the low half, the
//           sum of the other 16 in the high half
//
// A block has a second digit where one column is so large that all others are quantized to a few steps: where their |q|
// add up to less than LEAST_MAGNITUDES. The second digit is the remainder after the first, quantized again in the
// second plane. The sign of the first scale marks such a block. In all other blocks the second scale and sums are 0,
// and the second q have no meaning.
//
// A weight is w = s q' + m, with s and m for each group of columns. Each block of 32 columns, or each half of it where
// groups are no multiple of 32, contributes:
//
//   d    the dot product of q and q', in integers; an integer offset of q' is part of it
//   acc  = fma(float(d), s * scale, acc), and where weights are shifted, then acc = fma(float(sum), m * scale, acc)
//
// A second digit is folded behind the first, in the same way. The blocks of a row are cut into segments of
// segment_blocks() blocks. Within a segment blocks are folded in order from acc = 0, and then segments are added in
// order. A scale of the whole row comes last. No kernel, whatever its shape, sums columns in another order. Every float
// operation is decorated NoContraction (build.rs); fma() stands where it is meant.

const uint BLOCK_COLS = 32;
// Most segments of a row, and fewest blocks of a segment.
const uint SEGMENTS = 8;
const uint LEAST_SEGMENT_BLOCKS = 4;

uint segment_blocks(uint blocks) { return max(LEAST_SEGMENT_BLOCKS, (blocks + SEGMENTS - 1) / SEGMENTS); }

// A block of activations: 32 columns of one row.
struct ActivationBlock {
    uvec4 low;
    uvec4 high;
};
layout(buffer_reference, std430, buffer_reference_align = 16) readonly buffer ActivationBlocks { ActivationBlock at[]; };
layout(buffer_reference, std430, buffer_reference_align = 8) readonly buffer ActivationScales { uvec2 at[]; };

// A block needs a second digit if the magnitudes of its q add up to less than this, 14 for each column. One of them is
// 127.
const int LEAST_MAGNITUDES = 14 * 32;
const uint SECOND_DIGIT = 0x80000000u;

int low_sum(uint sums) { return int(sums << 16) >> 16; }
int high_sum(uint sums) { return int(sums) >> 16; }

// Magnitudes are compared by their bits. So a NaN or an infinity is the largest, and makes the scale NaN or infinite
// too. It reaches the logits, which are refused.
uint magnitude(float value) { return floatBitsToUint(value) & 0x7fffffffu; }
uint magnitude(vec4 value) {
    return max(max(magnitude(value.x), magnitude(value.y)), max(magnitude(value.z), magnitude(value.w)));
}

// The scale of a block; `largest` holds the bits of its largest magnitude. Magnitudes below 2^-90 count as 0: such a
// scale times that of a weight would leave the normal numbers, which drivers treat differently. 1/127 is a factor,
// because division is not exact in Vulkan.
const uint LEAST_MAGNITUDE = 0x12800000u;
float scale_of(uint largest) {
    return largest < LEAST_MAGNITUDE ? 0.0 : uintBitsToFloat(largest) * 0.007874015748031496;
}

int quantized(float value, uint largest) {
    const float inverse = largest < LEAST_MAGNITUDE ? 0.0 : 127.0 / uintBitsToFloat(largest);
    return int(clamp(roundEven(value * inverse), -127.0, 127.0));
}

uint packed_four(ivec4 q) {
    return uint(q.x & 0xff) | uint(q.y & 0xff) << 8 | uint(q.z & 0xff) << 16 | uint(q.w) << 24;
}

uint packed_sums(int low, int high) { return uint(low & 0xffff) | uint(high) << 16; }

// Whether a block needs a second digit. `largest` holds the bits of its largest magnitude; `magnitudes` is the sum of
// |q| in the first digit.
bool needs_second(uint largest, int magnitudes) { return largest >= LEAST_MAGNITUDE && magnitudes < LEAST_MAGNITUDES; }

// The bits of a scale, with the flag for a second digit in the sign.
uint flagged(float scale, bool has_second) { return floatBitsToUint(scale) | (has_second ? SECOND_DIGIT : 0); }
