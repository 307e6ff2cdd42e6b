// y[t, r] = sum over k of x[t, k] * W[r, k]
//
//   W  [rows, cols], packed (common/weights.glsl)     x  f32 [tokens, cols], rows x_stride apart (multiple of 4)
//   y  f32 [tokens, rows], rows y_stride apart
//
// A workgroup computes ROW_TILES x 32 rows by COLUMNS tokens: lane (row, split) walks every SPLITS-th block of its rows, and the
// splits' sums are added in order. That order depends on the matrix alone, so one token's result has the same bits whatever
// else is in the batch and however large the tiles are. What is the same for all lanes of a subgroup, activations above all, can
// come from scalar registers; where there are none, several tiles of rows use what was loaded. More than COLUMNS tokens take
// several passes over the weights: x counts passes that go together, z groups of such passes.
#version 460
#extension GL_GOOGLE_include_directive : require
#extension GL_KHR_shader_subgroup_ballot : require
#include "memory.glsl"
#include "weights.glsl"

const uint SPLITS = 4;
layout(local_size_x = 32, local_size_y = SPLITS) in;
layout(constant_id = 0) const uint COLUMNS = 1;
layout(constant_id = 1) const uint ROW_TILES = 1;

layout(push_constant, std430) uniform Push {
    Blocks blocks;
    Scales scales;
    ReadVec4s x;
    WriteFloats y;
    uint rows;
    uint cols;
    uint tokens;
    uint x_stride;
    uint y_stride;
    // Blocks that share one scale (common/weights.glsl).
    uint blocks_per_scale;
};

// It holds as many columns as there are splits: an invocation adds up one.
shared float partial[SPLITS][ROW_TILES][SPLITS][TILE_ROWS];

// What an invocation added up, what a block adds, unscaled, and the sums of the activations that a block multiplies.
float acc[ROW_TILES][COLUMNS];
float sum[ROW_TILES][COLUMNS];
float x_sum[COLUMNS];
uint tiles[ROW_TILES];
uvec4 block[ROW_TILES];

// Adds columns k to k + 3, the i-th four of a block; not all of them need be there.
void add_four(uint i, uint first_token, uint k, bool all_there) {
    vec4 w[ROW_TILES];
    [[unroll]] for (uint t = 0; t < ROW_TILES; t++) w[t] = block_weights(block[t], i);
    [[unroll]] for (uint c = 0; c < COLUMNS; c++) {
        // Spare columns repeat the last token, and are not stored.
        vec4 v = x.at[(min(first_token + c, tokens - 1) * x_stride + k) / 4];
        // Beyond the row lies another row or nothing: zero it, since 0 * NaN is NaN.
        if (!all_there) v = mix(vec4(0), v, lessThan(uvec4(k, k + 1, k + 2, k + 3), uvec4(cols)));
        [[unroll]] for (uint t = 0; t < ROW_TILES; t++)
            sum[t][c] = fma(w[t].w, v.w, fma(w[t].z, v.z, fma(w[t].y, v.y, fma(w[t].x, v.x, sum[t][c]))));
#if defined(SHIFTED)
        x_sum[c] += (v.x + v.y) + (v.z + v.w);
#endif
    }
}

void clear_sums() {
    [[unroll]] for (uint c = 0; c < COLUMNS; c++) {
        [[unroll]] for (uint t = 0; t < ROW_TILES; t++) sum[t][c] = 0.0;
        x_sum[c] = 0.0;
    }
}

// Adds what block b contributes, scaled.
void fold(uint b, uint lane, uint blocks_per_row) {
    [[unroll]] for (uint t = 0; t < ROW_TILES; t++) {
#if defined(SCALED_BY_GROUP)
        const vec2 scale = block_scale(scales, tiles[t], b, lane, blocks_per_row, blocks_per_scale);
        [[unroll]] for (uint c = 0; c < COLUMNS; c++) {
            acc[t][c] = fma(scale.x, sum[t][c], acc[t][c]);
#if defined(SHIFTED)
            acc[t][c] = fma(scale.y, x_sum[c], acc[t][c]);
#endif
        }
#else
        [[unroll]] for (uint c = 0; c < COLUMNS; c++) acc[t][c] += sum[t][c];
#endif
    }
}

void main() {
    const uint lane = gl_LocalInvocationID.x, split = subgroupBroadcastFirst(gl_LocalInvocationID.y);
    const uint first_tile = gl_WorkGroupID.y * ROW_TILES, last_tile = (rows - 1) / TILE_ROWS;
    const uint first_token = (gl_WorkGroupID.z * gl_NumWorkGroups.x + gl_WorkGroupID.x) * COLUMNS;
    if (first_token >= tokens) return;
    const uint blocks_per_row = (cols + BLOCK - 1) / BLOCK, whole = cols / BLOCK;

    uvec4 next[ROW_TILES];
    [[unroll]] for (uint t = 0; t < ROW_TILES; t++) {
        // Spare tiles of the last workgroup repeat the last tile, and are not stored.
        tiles[t] = min(first_tile + t, last_tile);
        next[t] = block_at(blocks, tiles[t], min(split, blocks_per_row - 1), lane, blocks_per_row);
        [[unroll]] for (uint c = 0; c < COLUMNS; c++) acc[t][c] = 0.0;
    }
    uint b = split;
    [[dont_unroll]] for (; b < whole; b += SPLITS) {
        // A block is asked for before the one before it is used.
        const uint ahead = min(b + SPLITS, blocks_per_row - 1);
        [[unroll]] for (uint t = 0; t < ROW_TILES; t++) {
            block[t] = next[t];
            next[t] = block_at(blocks, tiles[t], ahead, lane, blocks_per_row);
        }
        clear_sums();
        [[unroll]] for (uint i = 0; i < BLOCK / 4; i++) add_four(i, first_token, b * BLOCK + 4 * i, true);
        fold(b, lane, blocks_per_row);
    }
    // One of the splits ends with a block that has fewer columns.
    if (b < blocks_per_row) {
        [[unroll]] for (uint t = 0; t < ROW_TILES; t++) block[t] = next[t];
        clear_sums();
        [[dont_unroll]] for (uint i = 0; b * BLOCK + 4 * i < cols; i++)
            add_four(i, first_token, b * BLOCK + 4 * i, false);
        fold(b, lane, blocks_per_row);
    }

    // An invocation adds up the splits of column `split` of those that are staged, in order.
    [[unroll]] for (uint staged = 0; staged < COLUMNS; staged += SPLITS) {
        if (staged > 0) barrier();
        [[unroll]] for (uint t = 0; t < ROW_TILES; t++)
            [[unroll]] for (uint c = 0; c < SPLITS; c++)
                if (staged + c < COLUMNS) partial[split][t][c][lane] = acc[t][staged + c];
        barrier();
        const uint token = first_token + staged + split;
        const bool is_one = staged + split < COLUMNS && token < tokens;
        [[unroll]] for (uint t = 0; t < ROW_TILES; t++) {
            const uint row = (first_tile + t) * TILE_ROWS + lane;
            if (is_one && row < rows) {
                float total = partial[0][t][split][lane];
                [[unroll]] for (uint s = 1; s < SPLITS; s++) total += partial[s][t][split][lane];
#if defined(SCALES_ROW)
                total *= half_of(scales, first_tile + t, lane);
#endif
                y.at[token * y_stride + row] = total;
            }
        }
    }
}
