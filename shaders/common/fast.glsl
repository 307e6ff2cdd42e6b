// The contract of the precision `fast`: an answer has the same bits alone, in a batch, with chunked prefill, with
// prefix caching, and with speculative decoding (docs/architecture.md, "The contract of fast"). The reference
// implementation on the CPU is tests/support/reference.rs.
//
// Activations [rows, cols] are int8, in blocks of BLOCK_COLS columns of one row, for every kind of matrix:
//
//   x       [2][ceil(cols/32)][rows, padded][32]  q = x / scale, rounded to even, -127..127; 0 beyond the columns
//   scales  [2][ceil(cols/32)][rows, padded] of (f32 scale, i32 sums): the sum of the first 16 q in the low half, the
//           sum of all 32 times -8 in the high half, as int4 weights need it
//
// A block has second digits if one column is so large that the others are quantized to only a few steps: if the sum of
// all |q| is less than LEAST_MAGNITUDES. The second digits are the remainders after the first digits, quantized again,
// in the second plane. A negative first scale marks such a block. In every other block the second scale and sums are 0,
// and the second q are undefined.
//
// A weight is w = s q' + m, with s and m for each group of columns. Each block of 32 columns contributes as follows; if
// the group size is not a multiple of 32, each half of a block does:
//
//   d    the dot product of q and q', in integers, including an integer offset of q'
//   acc  = fma(float(d), s * scale, acc), and if the scheme has m, then acc = fma(float(sum), m * scale, acc)
//
// The second digits of a block are added after the first, in the same way. The blocks of a row are divided into
// segments of segment_blocks() blocks. Within a segment, blocks are added in order, starting from acc = 0. Then the
// segments are added in order. A scale for the whole row is applied last. All kernels sum in this order. Every float
// operation is decorated NoContraction (build.rs), so an fma is used only where the code calls fma().

const uint BLOCK_COLS = 32;
// The most segments of a row, and the fewest blocks of a segment.
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

// A block needs second digits if the sum of its |q| is less than this: 14 per column on average. The largest |q| of a
// block is 127, unless all of its values count as 0.
const int LEAST_MAGNITUDES = 14 * 32;
const uint SECOND_DIGIT = 0x80000000u;

// The sums of a block's q: of all 32 times -8, of all 32, of the first 16, and of the other 16.
int sum_by_minus_8(uint sums) { return int(sums) >> 16; }
int sum_of(uint sums) { return -(int(sums) >> 19); }
int low_sum(uint sums) { return int(sums << 16) >> 16; }
int high_sum(uint sums) { return sum_of(sums) - low_sum(sums); }

// Magnitudes are compared by their bits. So a NaN or an infinity counts as the largest, and makes the scale NaN or
// infinite, too. It propagates to the logits, where the sampler detects it.
uint magnitude(float value) { return floatBitsToUint(value) & 0x7fffffffu; }
uint magnitude(vec4 value) {
    return max(max(magnitude(value.x), magnitude(value.y)), max(magnitude(value.z), magnitude(value.w)));
}

// The scale of a block. `largest` holds the bits of its largest magnitude. Magnitudes below 2^-90 count as 0: the
// product of such a scale and a weight's scale could be subnormal, and drivers treat subnormals differently. The code
// multiplies by 1/127, because division is not exact in Vulkan.
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

// Packs the sums of the first and of the other 16 q.
uint packed_sums(int low, int high) { return uint(low & 0xffff) | uint(-8 * (low + high)) << 16; }

// Whether a block needs second digits. `largest` holds the bits of its largest magnitude; `magnitudes` is the sum of
// |q| of the first digits.
bool needs_second(uint largest, int magnitudes) { return largest >= LEAST_MAGNITUDE && magnitudes < LEAST_MAGNITUDES; }

// The bits of a scale, with the flag for second digits in the sign.
uint flagged(float scale, bool has_second) { return floatBitsToUint(scale) | (has_second ? SECOND_DIGIT : 0); }
