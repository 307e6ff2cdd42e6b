// An implementation of fast_matmul.comp in which subgroups multiply tiles (tile.glsl). A workgroup computes ROWS x
// COLUMNS results. It unpacks a block of its weights and a block of its activations into shared memory, and its WAVES_M
// x WAVES_N subgroups divide the tiles of the result among them. So weights are unpacked once for COLUMNS tokens, and
// one workgroup computes all segments of a row. Sums of integers are scaled in the same way as in the other
// implementations.

const uint ROWS = ROW_TILES * TILE_ROWS;
layout(constant_id = 3) const uint TILE_M = 16;
layout(constant_id = 4) const uint TILE_N = 16;
layout(constant_id = 5) const uint TILE_K = 16;
layout(constant_id = 6) const uint WAVES_M = 2;
layout(constant_id = 7) const uint WAVES_N = 2;
#include "tile.glsl"

// Numbers of tiles of one subgroup.
const uint TILES_M = ROWS / WAVES_M / TILE_M, TILES_N = COLUMNS / WAVES_N / TILE_N;
// If the two halves of a block have different scales (HALVES is 2), each half has its own sum. If TILE_K is a whole
// block, a tile then contains one half, with zeros in place of the other half. So shared memory has both halves of a
// row, each padded with zeros. All strides count uvec2s of 8 columns. They spread rows over the memory banks, and are
// multiples of 16 bytes.
const uint HALF = 2, HALF_STRIDE = 6;
const uint A_STRIDE = HALVES * 4 + 2, B_STRIDE = 6;
const uint SUM_COLUMNS = 32 / HALVES;
// Number of tile products that are added to one sum.
const uint STEPS = (SUM_COLUMNS + TILE_K - 1) / TILE_K;
const uint STEP = TILE_K / 8;

shared uvec2 a_words[ROWS * A_STRIDE];
shared uvec2 b_words[COLUMNS * B_STRIDE];
shared float row_scales[HALVES * ROWS];
#if defined(SHIFTED)
shared float row_shifts[HALVES * ROWS];
shared float column_sums[HALVES * COLUMNS];
#endif
shared float column_scales[COLUMNS];
// Whether any column has second digits, for blocks with even and with odd numbers.
shared uint second_digits[2];
shared float results[WAVES_M * WAVES_N * TILE_M * TILE_N];

// Subtracts BIAS from each of four unsigned bytes.
uint without_bias(uint four) { return BIAS == 0 ? four : ((four | 0x80808080u) - uint(BIAS) * 0x01010101u) ^ 0x80808080u; }
uvec4 without_bias(uvec4 all) {
    return uvec4(without_bias(all.x), without_bias(all.y), without_bias(all.z), without_bias(all.w));
}

void put_half(uint at, uvec4 words) {
    a_words[at] = words.xy;
    a_words[at + 1] = words.zw;
}

// Stores a block of weights of row `row` of the workgroup.
void put_weights(uint row, Weights w) {
    unpack_units(w);
#if defined(WEIGHT_INT4)
    const uvec4 low = w.units[0] & 0x0f0f0f0fu, high = w.units[0] >> 4 & 0x0f0f0f0fu;
#else
    const uvec4 low = w.units[0], high = w.units[UNITS - 1];
#endif
    const uint at = row * A_STRIDE;
    put_half(at, without_bias(low));
    if (HALVES == 1) {
        put_half(at + HALF, without_bias(high));
    } else {
        put_half(at + HALF, uvec4(0));
        put_half(at + 2 * HALF, uvec4(0));
        put_half(at + HALF_STRIDE, without_bias(high));
    }
#if defined(SCALED_BY_GROUP)
    [[unroll]] for (uint h = 0; h < HALVES; h++) {
        const vec2 s = scale_of_words(w.scales[min(h, UNITS - 1)], row % TILE_ROWS);
        row_scales[h * ROWS + row] = s.x;
#if defined(SHIFTED)
        row_shifts[h * ROWS + row] = s.y;
#endif
    }
#endif
}

// Stores a block of activations of column `column` of the workgroup.
void put_activations(uint column, ActivationBlock a, uvec2 scale) {
    const uint at = column * B_STRIDE;
    b_words[at] = a.low.xy;
    b_words[at + 1] = a.low.zw;
    b_words[at + 2] = a.high.xy;
    b_words[at + 3] = a.high.zw;
    column_scales[column] = abs(uintBitsToFloat(scale.x));
#if defined(SHIFTED)
    if (HALVES == 1) {
        column_sums[column] = float(sum_of(scale.y));
    } else {
        column_sums[column] = float(low_sum(scale.y));
        column_sums[(HALVES - 1) * COLUMNS + column] = float(high_sum(scale.y));
    }
#endif
}

void main() {
    const uint invocation = gl_LocalInvocationIndex;
    const uint first_token = (gl_WorkGroupID.z * gl_NumWorkGroups.x + gl_WorkGroupID.x) * COLUMNS;
    if (first_token >= tokens) return;
    const uint block_count = (cols + BLOCK_COLS - 1) / BLOCK_COLS, units_per_row = (cols + BLOCK - 1) / BLOCK;
    const uint length = segment_blocks(block_count);
    Part part = part_of(gl_WorkGroupID.y);

    // An invocation unpacks at most one row of weights and one column of activations. A workgroup has 128 invocations,
    // and at least 128 rows and columns in total.
    const uint invocations = gl_WorkGroupSize.x * gl_WorkGroupSize.y;
    const uint column = (invocation + ROWS) % invocations;
    const bool has_row = invocation < ROWS, has_column = column < COLUMNS;
    const uint tile = min(part.first_tile + invocation / TILE_ROWS, tiles_of(part.rows) - 1);
    const uint lane = invocation % TILE_ROWS;
    const bool is_token = first_token + column < tokens;
    const uint token = min(first_token + column, x_stride - 1);

    const uint wave_row = WAVE % WAVES_M * TILES_M * TILE_M, wave_column = WAVE / WAVES_M * TILES_N * TILE_N;
    TileFloat total[TILES_M][TILES_N], acc[TILES_M][TILES_N];
    if (invocation < 2) second_digits[invocation] = 0;
    barrier();

    Weights next;
    ActivationBlock next_block;
    uvec2 next_scale;
    if (has_row) next = weights_at(Blocks(part.blocks), Scales(part.scales), tile, 0, units_per_row, lane);
    if (has_column) {
        next_block = x.at[token];
        next_scale = x_scales.at[token];
    }
    [[dont_unroll]] for (uint first = 0; first < block_count; first += length) {
        [[unroll]] for (uint r = 0; r < TILES_M; r++)
            [[unroll]] for (uint c = 0; c < TILES_N; c++)
                EACH(e) acc[r][c][e] = 0.0;
        const uint end = min(first + length, block_count);
        [[dont_unroll]] for (uint b = first; b < end; b++) {
            if (has_row) put_weights(invocation, next);
            if (has_column) {
                put_activations(column, next_block, next_scale);
                if (is_token && (next_scale.x & SECOND_DIGIT) != 0) second_digits[b % 2] = 1;
            }
            barrier();
            const bool has_second = second_digits[b % 2] != 0;
            if (invocation == 0) second_digits[(b + 1) % 2] = 0;
            // The next block is loaded before this one is used.
            const uint ahead = min(b + 1, block_count - 1);
            if (has_row) next = weights_at(Blocks(part.blocks), Scales(part.scales), tile, ahead, units_per_row, lane);
            if (has_column) {
                next_block = x.at[ahead * x_stride + token];
                next_scale = x_scales.at[ahead * x_stride + token];
            }
            [[dont_unroll]] for (uint digit = 0; digit < 2; digit++) {
                [[unroll]] for (uint h = 0; h < HALVES; h++) {
                    TileA a[TILES_M][STEPS];
                    TileFloat s[TILES_M];
#if defined(SHIFTED)
                    TileFloat m[TILES_M];
#endif
                    [[unroll]] for (uint r = 0; r < TILES_M; r++) {
                        const uint row = wave_row + r * TILE_M;
                        // If TILE_K is a whole block, each half is stored with the zeros of the other half.
                        const uint half_at = row * A_STRIDE + h * (TILE_K > 16 ? 2 * HALF : HALF_STRIDE);
                        [[unroll]] for (uint k = 0; k < STEPS; k++) LOAD_A(a[r][k], a_words, half_at + k * STEP, A_STRIDE);
#if defined(SCALED_BY_GROUP)
                        LOAD_ROWS(s[r], row_scales, h * ROWS + row);
#endif
#if defined(SHIFTED)
                        LOAD_ROWS(m[r], row_shifts, h * ROWS + row);
#endif
                    }
                    [[unroll]] for (uint c = 0; c < TILES_N; c++) {
                        const uint at = wave_column + c * TILE_N;
                        TileB x_block[STEPS];
                        const uint half_at = at * B_STRIDE + (TILE_K > 16 ? 0 : h * HALF);
                        [[unroll]] for (uint k = 0; k < STEPS; k++) LOAD_B(x_block[k], b_words, half_at + k * STEP, B_STRIDE);
                        TileFloat scale;
                        LOAD_COLUMNS(scale, column_scales, at);
#if defined(SHIFTED)
                        TileFloat sums;
                        LOAD_COLUMNS(sums, column_sums, h * COLUMNS + at);
#endif
                        [[unroll]] for (uint r = 0; r < TILES_M; r++) {
                            TileSum d;
                            TileFloat f;
                            CLEAR(d);
                            [[unroll]] for (uint k = 0; k < STEPS; k++) MULTIPLY_ADD(d, a[r][k], x_block[k]);
                            FLOATS(f, d);
                            EACH(e) {
#if defined(SCALED_BY_GROUP)
                                acc[r][c][e] = fma(f[e], s[r][e] * scale[e], acc[r][c][e]);
#else
                                acc[r][c][e] = fma(f[e], scale[e], acc[r][c][e]);
#endif
#if defined(SHIFTED)
                                acc[r][c][e] = fma(sums[e], m[r][e] * scale[e], acc[r][c][e]);
#endif
                            }
                        }
                    }
                }
                barrier();
                if (digit == 1 || !has_second) break;
                if (has_column) {
                    const uint at = (block_count + b) * x_stride + token;
                    put_activations(column, x.at[at], x_scales.at[at]);
                }
                barrier();
            }
        }
        [[unroll]] for (uint r = 0; r < TILES_M; r++)
            [[unroll]] for (uint c = 0; c < TILES_N; c++)
                EACH(e)
                    total[r][c][e] = first == 0 ? acc[r][c][e] : total[r][c][e] + acc[r][c][e];
    }

#if defined(SCALES_ROW)
    if (has_row) row_scales[invocation] = half_of(Scales(part.scales), tile, lane);
    barrier();
#endif
    const uint first_row = part.first_tile * TILE_ROWS, result = WAVE * TILE_M * TILE_N;
    [[unroll]] for (uint r = 0; r < TILES_M; r++) {
        const uint row = wave_row + r * TILE_M;
#if defined(SCALES_ROW)
        TileFloat s;
        LOAD_ROWS(s, row_scales, row);
#endif
        [[unroll]] for (uint c = 0; c < TILES_N; c++) {
#if defined(SCALES_ROW)
            EACH(e) total[r][c][e] *= s[e];
#endif
            STORE(total[r][c], results, result);
            barrier();
            for (uint i = WAVE_LANE; i < TILE_M * TILE_N; i += WAVE_LANES) {
                const uint y_row = first_row + row + i % TILE_M;
                const uint y_token = first_token + wave_column + c * TILE_N + i / TILE_M;
                if (y_row < part.rows && y_token < tokens)
                    put(part, y_token, y_row, results[result + i]);
            }
            barrier();
        }
    }
}
