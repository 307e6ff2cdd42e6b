// The contract of `fast`, by which an answer has the same bits alone, batched, in chunks, from the cache and guessed
// (docs/architecture.md, "The contract of fast"). CPU twin: tests/reference.rs.
//
// Activations [rows, cols] are int8 in blocks of BLOCK_COLS columns of one row, whatever matrix they meet:
//
//   x       [2][ceil(cols/32)][rows, padded][32]  q = x / scale, rounded to even, -127..127; 0 beyond the columns
//   scales  [2][ceil(cols/32)][rows, padded] of (f32 scale, i32 sums): the sum of the first 16 q in the low half, that of
//           the others in the high half
//
// Where one column of a block is so large that the others are a few steps at most (their |q| add up to less than
// LEAST_MAGNITUDES), the block has a second digit: what the first leaves over, quantized again in the second plane. The
// sign of the first scale says so. Elsewhere the second scale and sums are 0, and its q are anything.
//
// A weight is w = s q' + m with s and m for each group of columns. Of each block of 32 columns, or each half of it where
// groups are no multiple of 32:
//
//   d    the dot product of q and q', in integers; an offset of q' that is an integer is part of it
//   acc  = fma(float(d), s * scale, acc), and where weights are shifted, then acc = fma(float(sum), m * scale, acc)
//
// A second digit is folded behind the first, in the same way. Blocks are cut into segments of segment_blocks() of them. Within a segment they are folded in order from acc = 0, then
// segments are added in order. A scale of whole rows comes last. No other order of sums over columns exists, whatever
// the shape of the kernel. Every float operation is decorated NoContraction (build.rs); fma() where it is meant.

const uint BLOCK_COLS = 32;
// Segments of a row, at most, and their least blocks.
const uint SEGMENTS = 8;
const uint LEAST_SEGMENT_BLOCKS = 4;

uint segment_blocks(uint blocks) { return max(LEAST_SEGMENT_BLOCKS, (blocks + SEGMENTS - 1) / SEGMENTS); }

// 32 columns of one row.
struct ActivationBlock {
    uvec4 low;
    uvec4 high;
};
layout(buffer_reference, std430, buffer_reference_align = 16) readonly buffer ActivationBlocks { ActivationBlock at[]; };
layout(buffer_reference, std430, buffer_reference_align = 8) readonly buffer ActivationScales { uvec2 at[]; };

// The second digit is asked for where the magnitudes of a block's q, of which one is 127, add up to less: 14 each.
const int LEAST_MAGNITUDES = 14 * 32;
const uint SECOND_DIGIT = 0x80000000u;

int low_sum(uint sums) { return int(sums << 16) >> 16; }
int high_sum(uint sums) { return int(sums) >> 16; }

// Largest magnitudes are compared by their bits, so that what is not a number is the largest of all, and makes the scale
// no number either: it shows in the logits, and is refused there.
uint magnitude(float value) { return floatBitsToUint(value) & 0x7fffffffu; }
uint magnitude(vec4 value) {
    return max(max(magnitude(value.x), magnitude(value.y)), max(magnitude(value.z), magnitude(value.w)));
}

// Of a block whose largest magnitude has these bits. What is below 2^-90 counts as 0: its scale times that of a weight
// would leave the normal numbers, which drivers treat in two ways. 1/127 is a factor, for division is not exact in Vulkan.
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

// Whether a block whose largest magnitude has these bits needs a second digit, by the sum of the first one's magnitudes.
bool needs_second(uint largest, int magnitudes) { return largest >= LEAST_MAGNITUDE && magnitudes < LEAST_MAGNITUDES; }

// A scale with its sign.
uint flagged(float scale, bool has_second) { return floatBitsToUint(scale) | (has_second ? SECOND_DIGIT : 0); }
