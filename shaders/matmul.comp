// y[t, r] = sum over k of x[t, k] * W[r, k]
//
//   W  [rows, cols], packed (common/weights.glsl)     x  f32 [tokens, cols], rows x_stride apart (multiple of 4)
//   y  f32 [tokens, rows], rows y_stride apart
//
// A workgroup computes ROW_TILES x 32 rows by COLUMNS tokens: lane (row, split) walks every SPLITS-th block of its
// rows, and the splits' sums are added in order. That order depends on the matrix alone, so one token's result has the
// same bits whatever else is in the batch and however large the tiles are.
#version 460
#extension GL_GOOGLE_include_directive : require
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

shared float partial[SPLITS][ROW_TILES][COLUMNS][TILE_ROWS];

vec4 load_x(uint token, uint k) {
    vec4 v = x.at[(token * x_stride + k) / 4];
    // Beyond the row lies another row or nothing: zero it, since 0 * NaN is NaN.
    return k + 4 <= cols ? v : mix(vec4(0), v, lessThan(uvec4(k, k + 1, k + 2, k + 3), uvec4(cols)));
}

void main() {
    const uint lane = gl_LocalInvocationID.x, split = gl_LocalInvocationID.y;
    const uint first_tile = gl_WorkGroupID.x * ROW_TILES, first_token = gl_WorkGroupID.y * COLUMNS;
    const uint last_tile = (rows - 1) / TILE_ROWS;
    const uint blocks_per_row = (cols + BLOCK - 1) / BLOCK;

    float acc[ROW_TILES][COLUMNS];
    [[unroll]] for (uint t = 0; t < ROW_TILES; t++)
        [[unroll]] for (uint c = 0; c < COLUMNS; c++) acc[t][c] = 0.0;

    for (uint b = split; b < blocks_per_row; b += SPLITS) {
        uvec4 block[ROW_TILES];
        float sum[ROW_TILES][COLUMNS];
#if defined(SHIFTED)
        float x_sum[COLUMNS];
        [[unroll]] for (uint c = 0; c < COLUMNS; c++) x_sum[c] = 0.0;
#endif
        [[unroll]] for (uint t = 0; t < ROW_TILES; t++) {
            // Spare tiles of the last workgroup repeat the last tile; spare columns, the last token. Neither is stored.
            const uint tile = min(first_tile + t, last_tile);
            block[t] = block_at(blocks, tile, b, lane, blocks_per_row);
            [[unroll]] for (uint c = 0; c < COLUMNS; c++) sum[t][c] = 0.0;
        }
        [[unroll]] for (uint i = 0; i < BLOCK / 4; i++) {
            const uint k = b * BLOCK + 4 * i;
            if (k < cols) {
                vec4 w[ROW_TILES];
                [[unroll]] for (uint t = 0; t < ROW_TILES; t++) w[t] = block_weights(block[t], i);
                [[unroll]] for (uint c = 0; c < COLUMNS; c++) {
                    const vec4 v = load_x(min(first_token + c, tokens - 1), k);
                    [[unroll]] for (uint t = 0; t < ROW_TILES; t++)
                        sum[t][c] =
                            fma(w[t].w, v.w, fma(w[t].z, v.z, fma(w[t].y, v.y, fma(w[t].x, v.x, sum[t][c]))));
#if defined(SHIFTED)
                    x_sum[c] += (v.x + v.y) + (v.z + v.w);
#endif
                }
            }
        }
        [[unroll]] for (uint t = 0; t < ROW_TILES; t++) {
#if defined(SCALED_BY_GROUP)
            const uint tile = min(first_tile + t, last_tile);
            const vec2 scale = block_scale(scales, tile, b, lane, blocks_per_row, blocks_per_scale);
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

    [[unroll]] for (uint t = 0; t < ROW_TILES; t++)
        [[unroll]] for (uint c = 0; c < COLUMNS; c++) partial[split][t][c][lane] = acc[t][c];
    barrier();

    for (uint t = 0; t < ROW_TILES; t++) {
        const uint row = (first_tile + t) * TILE_ROWS + lane;
        if (row >= rows) return;
        for (uint c = split; c < COLUMNS && first_token + c < tokens; c += SPLITS) {
            float sum = partial[0][t][c][lane];
            [[unroll]] for (uint s = 1; s < SPLITS; s++) sum += partial[s][t][c][lane];
#if defined(SCALES_ROW)
            sum *= half_of(scales, first_tile + t, lane);
#endif
            y.at[(first_token + c) * y_stride + row] = sum;
        }
    }
}
