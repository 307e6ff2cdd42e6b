// y[t, r] = sum over k of x[t, k] * W[r, k]
//
//   W  [rows, cols], packed (common/weights.glsl)     x  f32 [tokens, cols], rows x_stride apart (multiple of 4)
//   y  f32 [tokens, rows], rows y_stride apart
//
// A workgroup computes a tile of 32 rows by COLUMNS tokens. Lane (row, split) processes every SPLITS-th block of its
// row, and the sums of the splits are added in order. The order depends only on the matrix, so a token's result has the
// same bits in any batch and with any tile size. Data that all lanes of a subgroup share, mostly activations, can come
// from scalar registers. On a CPU device (ON_CPU), an invocation computes several rows from each activation that it
// loads, and processes the splits sequentially. More than COLUMNS tokens need several passes over the weights: the x
// dimension of the grid counts passes that run together, the z dimension counts groups of such passes.
//
// GROUPED computes products of experts (fast_matmul.comp): `tokens` is the number of pairs, and the matrix holds the
// matrices of all experts, of `rows` rows each, a multiple of 32.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "memory.glsl"
#include "weights.glsl"
#include "columns.glsl"

const uint SPLITS = 4;
layout(constant_id = 0) const uint COLUMNS = 1;
layout(constant_id = 9) const uint GROUPED = 0;
const uint IN_ORDER = 1, GATHERED = 2;
// ROWS is the number of rows of an invocation.
#if defined(ON_CPU)
#define WORKGROUP 32
#include "lanes.glsl"
#include "loads_on_cpu.glsl"
layout(local_size_x = INVOCATIONS) in;
const uint ROWS = TURNS;
// Invocations load single activations (common/loads_on_cpu.glsl).
#define ReadX ReadFloats
// Number of splits that are processed together. With one column, all splits are processed together, so that the weights
// are read in memory order.
const uint TOGETHER = COLUMNS == 1 ? SPLITS : 1;
#else
layout(local_size_x = 32, local_size_y = SPLITS) in;
const uint ROWS = 1;
#define ReadX ReadVec4s
const uint TOGETHER = 1;
uint lane_of(uint) { return gl_LocalInvocationID.x; }
#endif

layout(push_constant, std430) uniform Push {
    Blocks blocks;
    Scales scales;
    ReadX x;
    WriteFloats y;
    uint rows;
    uint cols;
    uint tokens;
    uint x_stride;
    uint y_stride;
    // Number of blocks that share one scale (common/weights.glsl).
    uint blocks_per_scale;
    ReadUvec4s items_or_none;
    ReadUints list_or_none;
};

// The columns of a workgroup, from `first` to before `end`, and the expert whose matrix they are multiplied with.
struct Columns {
    uint first;
    uint end;
    uint expert;
};

Columns own_columns() {
    if (GROUPED != 0) {
        const uvec4 item = items_or_none.at[gl_WorkGroupID.x];
        return Columns(item.y, item.y + item.z, item.x);
    }
    return Columns((gl_WorkGroupID.z * gl_NumWorkGroups.x + gl_WorkGroupID.x) * COLUMNS, tokens, 0);
}

// The row of x of a column. Unused columns repeat the last token, and are not stored.
uint x_row(uint column) {
    const uint last = min(column, tokens - 1);
    return GROUPED == GATHERED ? list_or_none.at[last] : last;
}

// The first tile of an expert's matrix.
uint first_tile_of(uint expert) { return expert * ((rows + TILE_ROWS - 1) / TILE_ROWS); }

// Four neighbouring activations; `at` is a multiple of 4.
vec4 four_of_x(uint at) {
#if defined(ON_CPU)
    return all_four(x.at[at + own_of_four()]);
#else
    return x.at[at / 4];
#endif
}

// The sums of an invocation; the unscaled contribution of one block; and the sums of the activations of that block.
float acc[TOGETHER][ROWS][COLUMNS];
float sum[ROWS][COLUMNS];
float x_sum[COLUMNS];
uvec4 block[ROWS];

void load_block(uint tile, uint b, uint blocks_per_row, out uvec4 to[ROWS]) {
    [[unroll]] for (uint r = 0; r < ROWS; r++) to[r] = block_at(blocks, tile, b, lane_of(r), blocks_per_row);
}

// Adds columns k to k + 3, which are the i-th four columns of a block. Unless `all_there`, some of them may be beyond
// the matrix.
void add_four(uint i, uint first_token, uint k, bool all_there) {
    vec4 w[ROWS];
    [[unroll]] for (uint r = 0; r < ROWS; r++) w[r] = block_weights(block[r], i);
    [[unroll]] for (uint c = 0; c < COLUMNS; c++) {
        vec4 v = four_of_x(x_row(first_token + c) * x_stride + k);
        // Memory beyond the row holds another row or undefined values. They are replaced by 0, since 0 * NaN is NaN.
        if (!all_there) v = within(v, k, cols);
        [[unroll]] for (uint r = 0; r < ROWS; r++)
            sum[r][c] = fma(w[r].w, v.w, fma(w[r].z, v.z, fma(w[r].y, v.y, fma(w[r].x, v.x, sum[r][c]))));
#if defined(SHIFTED)
        x_sum[c] += (v.x + v.y) + (v.z + v.w);
#endif
    }
}

void clear_sums() {
    [[unroll]] for (uint c = 0; c < COLUMNS; c++) {
        [[unroll]] for (uint r = 0; r < ROWS; r++) sum[r][c] = 0.0;
        x_sum[c] = 0.0;
    }
}

// Scales the contribution of block b, and adds it to split s.
void fold(uint s, uint tile, uint b, uint blocks_per_row) {
    [[unroll]] for (uint r = 0; r < ROWS; r++) {
#if defined(SCALED_BY_GROUP)
        const vec2 scale = block_scale(scales, tile, b, lane_of(r), blocks_per_row, blocks_per_scale);
        [[unroll]] for (uint c = 0; c < COLUMNS; c++) {
            acc[s][r][c] = fma(scale.x, sum[r][c], acc[s][r][c]);
#if defined(SHIFTED)
            acc[s][r][c] = fma(scale.y, x_sum[c], acc[s][r][c]);
#endif
        }
#else
        [[unroll]] for (uint c = 0; c < COLUMNS; c++) acc[s][r][c] += sum[r][c];
#endif
    }
}

// Adds a block that is completely inside the matrix. add_last adds a block that is partly beyond it.
void add_whole(uint s, uint tile, uint b, uint first_token, uint blocks_per_row) {
    clear_sums();
    [[unroll]] for (uint i = 0; i < BLOCK / 4; i++) add_four(i, first_token, b * BLOCK + 4 * i, true);
    fold(s, tile, b, blocks_per_row);
}

void add_last(uint s, uint tile, uint b, uint first_token, uint blocks_per_row) {
    clear_sums();
    [[dont_unroll]] for (uint i = 0; b * BLOCK + 4 * i < cols; i++)
        add_four(i, first_token, b * BLOCK + 4 * i, false);
    fold(s, tile, b, blocks_per_row);
}

void clear_acc() {
    [[unroll]] for (uint s = 0; s < TOGETHER; s++)
        [[unroll]] for (uint r = 0; r < ROWS; r++)
            [[unroll]] for (uint c = 0; c < COLUMNS; c++) acc[s][r][c] = 0.0;
}

#if defined(ON_CPU)
void main() {
    const Columns columns = own_columns();
    const uint first_token = columns.first, tile = first_tile_of(columns.expert) + gl_WorkGroupID.y;
    if (first_token >= columns.end) return;
    const uint blocks_per_row = (cols + BLOCK - 1) / BLOCK, whole = cols / BLOCK;

    float total[ROWS][COLUMNS];
    [[dont_unroll]] for (uint split = 0; split < SPLITS; split += TOGETHER) {
        clear_acc();
        [[dont_unroll]] for (uint first = split; first < blocks_per_row; first += SPLITS) {
            // A `break` out of the unrolled loop would keep the sums in memory.
            [[unroll]] for (uint s = 0; s < TOGETHER; s++) {
                const uint b = first + s;
                if (b < whole) {
                    load_block(tile, b, blocks_per_row, block);
                    add_whole(s, tile, b, first_token, blocks_per_row);
                } else if (b < blocks_per_row) {
                    load_block(tile, b, blocks_per_row, block);
                    add_last(s, tile, b, first_token, blocks_per_row);
                }
            }
        }
        [[unroll]] for (uint s = 0; s < TOGETHER; s++)
            [[unroll]] for (uint r = 0; r < ROWS; r++)
                [[unroll]] for (uint c = 0; c < COLUMNS; c++)
                    total[r][c] = split + s == 0 ? acc[s][r][c] : total[r][c] + acc[s][r][c];
    }
    [[unroll]] for (uint r = 0; r < ROWS; r++) {
        const uint row = gl_WorkGroupID.y * TILE_ROWS + lane_of(r);
        if (row >= rows) return;
#if defined(SCALES_ROW)
        const float scale = half_of(scales, tile, lane_of(r));
        [[unroll]] for (uint c = 0; c < COLUMNS; c++) total[r][c] *= scale;
#endif
        [[unroll]] for (uint c = 0; c < COLUMNS; c++)
            if (first_token + c < columns.end) y.at[(first_token + c) * y_stride + row] = total[r][c];
    }
}
#else
#include "invocation.glsl"

// The array has SPLITS columns, because each invocation adds up one column.
shared float partial[SPLITS][SPLITS][TILE_ROWS];

void main() {
    const uint lane = own_invocation() % TILE_ROWS, split = own_group(TILE_ROWS);
    const Columns columns = own_columns();
    const uint first_token = columns.first, tile = first_tile_of(columns.expert) + gl_WorkGroupID.y;
    if (first_token >= columns.end) return;
    const uint blocks_per_row = (cols + BLOCK - 1) / BLOCK, whole = cols / BLOCK;

    uvec4 next[ROWS];
    load_block(tile, min(split, blocks_per_row - 1), blocks_per_row, next);
    clear_acc();
    uint b = split;
    [[dont_unroll]] for (; b < whole; b += SPLITS) {
        // Each block is loaded before the previous one is used.
        block = next;
        load_block(tile, min(b + SPLITS, blocks_per_row - 1), blocks_per_row, next);
        add_whole(0, tile, b, first_token, blocks_per_row);
    }
    // The last block of a row may have fewer columns. It belongs to one of the splits.
    if (b < blocks_per_row) {
        block = next;
        add_last(0, tile, b, first_token, blocks_per_row);
    }

    // An invocation adds up, in order, the splits of column `split` of the staged columns.
    [[unroll]] for (uint staged = 0; staged < COLUMNS; staged += SPLITS) {
        if (staged > 0) barrier();
        [[unroll]] for (uint c = 0; c < SPLITS; c++)
            if (staged + c < COLUMNS) partial[split][c][lane] = acc[0][0][staged + c];
        barrier();
        const uint token = first_token + staged + split, row = gl_WorkGroupID.y * TILE_ROWS + lane;
        if (staged + split < COLUMNS && token < columns.end && row < rows) {
            float total = partial[0][split][lane];
            [[unroll]] for (uint s = 1; s < SPLITS; s++) total += partial[s][split][lane];
#if defined(SCALES_ROW)
            total *= half_of(scales, tile, lane);
#endif
            y.at[token * y_stride + row] = total;
        }
    }
}
#endif
