// y[t, r] = sum over k of x[t, k] * W[r, k]
//
//   W  [rows, cols], packed (common/weights.glsl)     x  f32 [tokens, cols], rows x_stride apart (multiple of 4)
//   y  f32 [tokens, rows], rows y_stride apart
//
// A workgroup computes 32 rows x COLUMNS tokens: lane (row, split) walks every SPLITS-th block of its row, and
// the splits' sums are added in order. That order depends on the matrix alone, so one token's result has the
// same bits whatever else is in the batch and whichever COLUMNS is chosen.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "memory.glsl"
#include "weights.glsl"

const uint SPLITS = 4;
layout(local_size_x = 32, local_size_y = SPLITS) in;
layout(constant_id = 0) const uint COLUMNS = 1;

layout(push_constant, std430) uniform Push {
    Blocks blocks;
    ReadUints scales;
    ReadVec4s x;
    WriteFloats y;
    uint rows;
    uint cols;
    uint tokens;
    uint x_stride;
    uint y_stride;
    // int4: blocks that share one scale (group / 32).
    uint blocks_per_scale;
};

shared float partial[SPLITS][COLUMNS][TILE_ROWS];

vec4 load_x(uint token, uint k) {
    vec4 v = x.at[(token * x_stride + k) / 4];
    // Beyond the row lies another row or nothing: zero it, since 0 * NaN is NaN.
    return k + 4 <= cols ? v : mix(vec4(0), v, lessThan(uvec4(k, k + 1, k + 2, k + 3), uvec4(cols)));
}

void main() {
    const uint lane = gl_LocalInvocationID.x, split = gl_LocalInvocationID.y;
    const uint tile = gl_WorkGroupID.x, first_token = gl_WorkGroupID.y * COLUMNS;
    const uint blocks_per_row = (cols + BLOCK - 1) / BLOCK;
#if defined(WEIGHT_INT4)
    const uint scales_per_row = (blocks_per_row + blocks_per_scale - 1) / blocks_per_scale;
#endif

    float acc[COLUMNS];
    [[unroll]] for (uint c = 0; c < COLUMNS; c++) acc[c] = 0.0;

    for (uint b = split; b < blocks_per_row; b += SPLITS) {
        const uvec4 block = blocks.at[(tile * blocks_per_row + b) * TILE_ROWS + lane];
#if defined(WEIGHT_INT4)
        const float scale =
            scale_at(scales, (tile * scales_per_row + b / blocks_per_scale) * TILE_ROWS + lane);
#endif
        [[unroll]] for (uint c = 0; c < COLUMNS; c++) {
            // The last tile of tokens may be short: its spare columns repeat the last token, and are not stored.
            const uint token = min(first_token + c, tokens - 1);
            float sum = 0.0;
            [[unroll]] for (uint i = 0; i < BLOCK / 4; i++) {
                const uint k = b * BLOCK + 4 * i;
                if (k < cols) {
                    const vec4 w = block_weights(block, i), v = load_x(token, k);
                    sum = fma(w.w, v.w, fma(w.z, v.z, fma(w.y, v.y, fma(w.x, v.x, sum))));
                }
            }
#if defined(WEIGHT_INT4)
            acc[c] = fma(scale, sum, acc[c]);
#else
            acc[c] += sum;
#endif
        }
    }

    [[unroll]] for (uint c = 0; c < COLUMNS; c++) partial[split][c][lane] = acc[c];
    barrier();

    const uint row = tile * TILE_ROWS + lane;
    if (row >= rows) return;
    for (uint c = split; c < COLUMNS && first_token + c < tokens; c += SPLITS) {
        float sum = partial[0][c][lane];
        [[unroll]] for (uint s = 1; s < SPLITS; s++) sum += partial[s][c][lane];
#if defined(WEIGHT_INT8)
        sum *= scale_at(scales, row);
#endif
        y.at[(first_token + c) * y_stride + row] = sum;
    }
}
