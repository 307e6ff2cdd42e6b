// An implementation of fast_matmul.comp in which subgroups multiply tiles (tile.glsl). A workgroup computes ROWS x
// COLUMNS results. It unpacks a block of its weights and a block of its activations into shared memory, and its WAVES_M
// x WAVES_N subgroups divide the tiles of the result among them. So weights are unpacked once for COLUMNS tokens, and
// one workgroup computes all segments of a row. Sums of integers are scaled in the same way as in the other
// implementations.
//
// Shared memory has two buffers. While subgroups multiply from one, others already fill the next, so that a block needs
// one barrier. A block is loaded from memory one block before it is stored there, two before it is multiplied.

#include "invocation.glsl"

const uint ROWS = ROW_TILES * TILE_ROWS;
layout(constant_id = 3) const uint TILE_M = 16;
layout(constant_id = 4) const uint TILE_N = 16;
layout(constant_id = 5) const uint TILE_K = 16;
layout(constant_id = 6) const uint WAVES_M = 4;
layout(constant_id = 7) const uint WAVES_N = 2;
#include "tile.glsl"

// Numbers of tiles of one subgroup.
const uint TILES_M = ROWS / WAVES_M / TILE_M, TILES_N = COLUMNS / WAVES_N / TILE_N;
// If the two halves of a block have different scales (HALVES is 2), each half has its own sum. If TILE_K is also a whole
// block (IS_PADDED is 1), a tile contains one half, with zeros in place of the other half. So shared memory has both
// halves of a row, each padded with zeros, and room for one buffer. All strides count uvec2s of 8 columns. They spread
// rows over the memory banks, and are multiples of 16 bytes.
const uint IS_PADDED = (HALVES - 1) * (TILE_K / BLOCK_COLS), BUFFERS = 2 - IS_PADDED;
const uint HALF = 2, A_STRIDE = 6 + 4 * IS_PADDED, B_STRIDE = 6;
const uint SUM_COLUMNS = BLOCK_COLS / HALVES;
// Number of tile products that are added to one sum.
const uint STEPS = (SUM_COLUMNS + TILE_K - 1) / TILE_K;
const uint STEP = TILE_K / 8;

// The sizes of a buffer, and of all buffers.
const uint A_WORDS = ROWS * A_STRIDE, B_WORDS = COLUMNS * B_STRIDE, ROW_SCALES = HALVES * ROWS, COLUMN_SUMS = HALVES * COLUMNS;
const uint ALL_A_WORDS = BUFFERS * A_WORDS, ALL_B_WORDS = BUFFERS * B_WORDS;
const uint ALL_ROW_SCALES = BUFFERS * ROW_SCALES, ALL_COLUMN_SUMS = BUFFERS * COLUMN_SUMS, ALL_COLUMNS = BUFFERS * COLUMNS;
// After the last block, `a_words` holds results: at most 256 of each subgroup.
shared uvec2 a_words[ALL_A_WORDS];
shared uvec2 b_words[ALL_B_WORDS];
shared float row_scales[ALL_ROW_SCALES];
#if defined(SHIFTED)
shared float row_shifts[ALL_ROW_SCALES];
shared float column_sums[ALL_COLUMN_SUMS];
#endif
shared float column_scales[ALL_COLUMNS];
// For blocks with even and with odd numbers, the last one that has second digits, plus 1. The other two are not used:
// every shared array is a multiple of 16 bytes (`Shader::shared_bytes`).
shared uint second_digits[4];

// Stored weights have BIAS added, which is half of their range. If they are in the highest bits of their bytes, an
// exclusive or of the highest bit removes it: the byte is then the weight times WEIGHT_FACTOR. The scale of a row takes
// that factor back, without rounding: fast.glsl says how small a scale is.
const int WEIGHT_FACTOR = BIAS == 0 ? 1 : 128 / max(BIAS, 1);
uint without_bias(uint four) { return BIAS == 0 ? four : four ^ 0x80808080u; }
uvec2 without_bias(uvec2 eight) { return uvec2(without_bias(eight.x), without_bias(eight.y)); }

// Indices of 16 bytes below this have offsets of 32 bits.
const uint MOST_ELEMENTS = 0x0fffffffu;

// Two invocations unpack a row: each half of a tile's row is next to the other one. A subgroup has at most 64
// invocations, so its rows belong to one tile.
const uint TILE_INVOCATIONS = 2 * TILE_ROWS;
#if defined(WEIGHT_INT4)
// An invocation unpacks eight weights of the first half of a block, and as many of the second.
struct BlockHalves { uvec2 at[TILE_INVOCATIONS]; };
layout(buffer_reference, std430, buffer_reference_align = 16) readonly buffer HalfBlocks { BlockHalves at[]; };
#define WORDS uvec2
#else
// An invocation unpacks sixteen weights: one of the two units of a block.
#define WORDS uvec4
#endif

// The share of an invocation in each block: half of a row of weights, and half of a column of activations.
struct Share {
    // The tile of the matrix, the row of the tile, and that row's and the column's number in the workgroup.
    uint tile;
    uint row;
    uint workgroup_row;
    uint column;
    // Which half of the row and of the column it is.
    uint half_index;
    // The indices of the column's half and of its scale among those of all tokens.
    uint activations_at;
    uint scale_at;
    // SECOND_DIGIT, or 0 if the column is no token.
    uint second_digit;
};

// A share of a block, on its way to shared memory.
struct Moved {
    WORDS weights;
#if defined(HIGH_BITS)
    HIGH_BITS high;
#endif
    uvec2 row_scale;
    uvec4 activations;
    uvec2 scale;
};

// Push constants, read once.
struct Inputs {
    uvec2 x;
    uvec2 x_scales;
    uint x_stride;
    uint units_per_row;
};

Moved load_share(Part part, Inputs inputs, Share own, uint block) {
    Moved moved;
    const uint unit = block * UNITS, units_per_row = inputs.units_per_row;
#if defined(WEIGHT_INT4)
    moved.weights = HalfBlocks(part.blocks).at[own.tile * units_per_row + unit].at[own.row * 2 + own.half_index];
#elif defined(HIGH_BITS)
    const uint at = own.tile * ((units_per_row + 1) / UNITS) + block;
    moved.weights = Blocks(part.blocks).at[at].lanes[own.row];
    moved.high = Blocks(part.blocks).at[at].high[own.row];
#else
    // In the last block of a row, the second unit may be missing.
    const uint own_unit = unit + own.half_index;
    moved.weights = own_unit < units_per_row ? Blocks(part.blocks).at[own.tile * units_per_row + own_unit].lanes[own.row] : uvec4(0);
#endif
    moved.row_scale = uvec2(0);
#if defined(SCALED_BY_GROUP)
    const uint scaled = HALVES == 1 ? unit : unit + own.half_index;
    if (HALVES == 1 || scaled < units_per_row)
        moved.row_scale = scale_words(Scales(part.scales), own.tile, scaled, own.row, units_per_row, SCALE_BLOCKS);
#endif
    const uint first = block * inputs.x_stride;
    moved.activations = ReadUvec4s(address_after(inputs.x, first * 32)).at[own.activations_at];
    moved.scale = ActivationScales(address_after(inputs.x_scales, first * 8)).at[own.scale_at];
    return moved;
}

// The buffer of a block. The compiler knows that it is 0 or 1, so that constants become offsets of instructions.
uint buffer_of(uint block) { return block % BUFFERS; }

void store_weights(uint buffer_index, Share own, Moved moved) {
    const uint at = buffer_index * A_WORDS + own.workgroup_row * A_STRIDE;
#if defined(WEIGHT_INT4)
    const uvec2 low = BIAS == 0 ? moved.weights & 0x0f0f0f0fu : moved.weights << 4 & 0xf0f0f0f0u;
    const uvec2 high = BIAS == 0 ? moved.weights >> 4 & 0x0f0f0f0fu : moved.weights & 0xf0f0f0f0u;
    a_words[at + own.half_index] = without_bias(low);
    a_words[at + HALF + own.half_index] = without_bias(high);
#else
#if defined(HIGH_BITS)
    const uvec4 bytes = bytes_of(moved.weights, moved.high, own.half_index) * uint(WEIGHT_FACTOR);
#else
    const uvec4 bytes = moved.weights;
#endif
    const uint half_at = at + own.half_index * HALF * (1 + 2 * IS_PADDED);
    a_words[half_at] = without_bias(bytes.xy);
    a_words[half_at + 1] = without_bias(bytes.zw);
#endif
#if defined(SCALED_BY_GROUP)
    // With one scale for both halves, both invocations store the same.
    const vec2 s = scale_of_words(moved.row_scale, own.row);
    const uint scale_at = buffer_index * ROW_SCALES + (HALVES - 1) * own.half_index * ROWS + own.workgroup_row;
    row_scales[scale_at] = s.x / float(WEIGHT_FACTOR);
#if defined(SHIFTED)
    row_shifts[scale_at] = s.y;
#endif
#endif
}

void store_activations(uint buffer_index, Share own, uvec4 activations, uvec2 scale) {
    // If there are fewer columns than rows, the last invocations have none.
    if (own.column >= COLUMNS) return;
    const uint at = buffer_index * B_WORDS + own.column * B_STRIDE + own.half_index * HALF;
    b_words[at] = activations.xy;
    b_words[at + 1] = activations.zw;
    column_scales[buffer_index * COLUMNS + own.column] = abs(uintBitsToFloat(scale.x));
#if defined(SHIFTED)
    const uint sums_at = buffer_index * COLUMN_SUMS + (HALVES - 1) * own.half_index * COLUMNS + own.column;
    if (HALVES == 1) column_sums[sums_at] = float(sum_of(scale.y));
    else column_sums[sums_at] = float(own.half_index == 0 ? low_sum(scale.y) : high_sum(scale.y));
#endif
}

void store_share(uint block, Share own, Moved moved) {
    store_weights(buffer_of(block), own, moved);
    store_activations(buffer_of(block), own, moved.activations, moved.scale);
    if ((moved.scale.x & own.second_digit) != 0) second_digits[block % 2] = block + 1;
}

void main() {
    const Columns columns = own_columns();
    const uint first_token = columns.first, end_token = columns.end;
    if (first_token >= end_token) return;
    const uint block_count = (cols + BLOCK_COLS - 1) / BLOCK_COLS;
    const uint length = segment_blocks(block_count), last = block_count - 1;
    Part part = part_of(gl_WorkGroupID.y, columns.expert);

    Inputs inputs = Inputs(uvec2(x), uvec2(x_scales), x_stride, (cols + BLOCK - 1) / BLOCK);

    const uint invocation = own_invocation(), row_tile = own_group(TILE_INVOCATIONS);
    Share own;
    own.tile = min(part.first_tile + row_tile, part.tiles_end - 1);
    own.row = invocation % TILE_INVOCATIONS / 2;
    own.workgroup_row = row_tile * TILE_ROWS + own.row;
    own.column = invocation / 2;
    own.half_index = invocation % 2;
    const uint column = first_token + own.column;
    const uint token = GROUPED == GATHERED ? x_row(column) : min(column, x_stride - 1);
    // The masks let the compiler know that offsets of these elements have 32 bits.
    own.activations_at = token * 2 + own.half_index & MOST_ELEMENTS;
    own.scale_at = token & MOST_ELEMENTS;
    own.second_digit = own.column < COLUMNS && first_token + own.column < end_token ? SECOND_DIGIT : 0;

    const uint wave_row = WAVE % WAVES_M * TILES_M * TILE_M, wave_column = WAVE / WAVES_M * TILES_N * TILE_N;
    TileFloat total[TILES_M][TILES_N], acc[TILES_M][TILES_N];
    if (IS_PADDED == 1) {
        // The zeros that pad the halves of a row.
        const uint at = own.workgroup_row * A_STRIDE + HALF + own.half_index * HALF;
        a_words[at] = uvec2(0);
        a_words[at + 1] = uvec2(0);
    }
    if (invocation < 2) second_digits[invocation] = 0;
    barrier();

    store_share(0, own, load_share(part, inputs, own, 0));
    Moved next = load_share(part, inputs, own, min(1, last));
    [[dont_unroll]] for (uint first = 0; first < block_count; first += length) {
        [[unroll]] for (uint r = 0; r < TILES_M; r++)
            [[unroll]] for (uint c = 0; c < TILES_N; c++)
                EACH(e) acc[r][c][e] = 0.0;
        const uint end = min(first + length, block_count);
        [[dont_unroll]] for (uint b = first; b < end; b++) {
            barrier();
            const uint buffer_index = buffer_of(b);
            const bool has_second = second_digits[b % 2] == b + 1;
            const uint a_at = buffer_index * A_WORDS + wave_row * A_STRIDE;
            const uint b_at = buffer_index * B_WORDS + wave_column * B_STRIDE;
            const uint rows_at = buffer_index * ROW_SCALES + wave_row, columns_at = buffer_index * COLUMNS + wave_column;
            const uint sums_at = buffer_index * COLUMN_SUMS + wave_column;
            [[dont_unroll]] for (uint digit = 0; digit < 2; digit++) {
                [[unroll]] for (uint h = 0; h < HALVES; h++) {
                    [[unroll]] for (uint r = 0; r < TILES_M; r++) {
                        TileA a[STEPS];
                        const uint half_at = a_at + r * TILE_M * A_STRIDE + h * HALF * (1 + IS_PADDED);
                        [[unroll]] for (uint k = 0; k < STEPS; k++) LOAD_A(a[k], a_words, half_at + k * STEP, A_STRIDE);
#if defined(SCALED_BY_GROUP)
                        TileFloat s;
                        LOAD_ROWS(s, row_scales, rows_at + h * ROWS + r * TILE_M);
#endif
#if defined(SHIFTED)
                        TileFloat m;
                        LOAD_ROWS(m, row_shifts, rows_at + h * ROWS + r * TILE_M);
#endif
                        // The activations are loaded again for each row of tiles. Registers have no room for all of them.
                        [[unroll]] for (uint c = 0; c < TILES_N; c++) {
                            TileB x_block[STEPS];
                            const uint other_at = b_at + c * TILE_N * B_STRIDE + h * HALF * (1 - IS_PADDED);
                            [[unroll]] for (uint k = 0; k < STEPS; k++)
                                LOAD_B(x_block[k], b_words, other_at + k * STEP, B_STRIDE);
                            TileFloat scale;
                            LOAD_COLUMNS(scale, column_scales, columns_at + c * TILE_N);
#if defined(SHIFTED)
                            TileFloat sums;
                            LOAD_COLUMNS(sums, column_sums, sums_at + h * COLUMNS + c * TILE_N);
#endif
                            TileSum d;
                            TileFloat f;
                            CLEAR(d);
                            [[unroll]] for (uint k = 0; k < STEPS; k++) MULTIPLY_ADD(d, a[k], x_block[k]);
                            FLOATS(f, d);
                            EACH(e) {
#if defined(SCALED_BY_GROUP)
                                acc[r][c][e] = fma(f[e], s[e] * scale[e], acc[r][c][e]);
#else
                                acc[r][c][e] = fma(f[e], scale[e], acc[r][c][e]);
#endif
#if defined(SHIFTED)
                                acc[r][c][e] = fma(sums[e], m[e] * scale[e], acc[r][c][e]);
#endif
                            }
                        }
                    }
                }
                if (digit == 1 || !has_second) break;
                barrier();
                const uint second = (block_count + b) * inputs.x_stride;
                store_activations(buffer_index, own,
                                  ReadUvec4s(address_after(inputs.x, second * 32)).at[own.activations_at],
                                  ActivationScales(address_after(inputs.x_scales, second * 8)).at[own.scale_at]);
                barrier();
            }
            if (BUFFERS == 1) barrier();
            store_share(b + 1, own, next);
            next = load_share(part, inputs, own, min(b + 2, last));
        }
        [[unroll]] for (uint r = 0; r < TILES_M; r++)
            [[unroll]] for (uint c = 0; c < TILES_N; c++)
                EACH(e)
                    total[r][c][e] = first == 0 ? acc[r][c][e] : total[r][c][e] + acc[r][c][e];
    }

    barrier();
#if defined(SCALES_ROW)
    if (own.half_index == 0) row_scales[own.workgroup_row] = half_of(Scales(part.scales), own.tile, own.row);
    barrier();
#endif
    const uint first_row = part.first_row, result = WAVE * (TILE_M * TILE_N / 2);
    [[unroll]] for (uint r = 0; r < TILES_M; r++) {
        const uint result_row = wave_row + r * TILE_M;
#if defined(SCALES_ROW)
        TileFloat s;
        LOAD_ROWS(s, row_scales, result_row);
#endif
        [[unroll]] for (uint c = 0; c < TILES_N; c++) {
#if defined(SCALES_ROW)
            EACH(e) total[r][c][e] *= s[e];
#endif
            STORE(total[r][c], a_words, result);
            barrier();
            for (uint i = WAVE_LANE; i < TILE_M * TILE_N; i += WAVE_LANES) {
                const uint y_row = first_row + result_row + i % TILE_M;
                const uint y_token = first_token + wave_column + c * TILE_N + i / TILE_M;
                if (y_row < part.rows && y_token < end_token)
                    put(part, y_token, y_row, uintBitsToFloat(a_words[result + i / 2][i % 2]));
            }
            barrier();
        }
    }
}
