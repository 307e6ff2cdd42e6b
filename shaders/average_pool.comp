// y[p, c] = m, or (m * factor - bias_c) * scale_c with STANDARDIZE, where m is the mean of x[t, c] over the tokens t of
// square p
//
//   x  f32 [down * across, width]: a grid of tokens, row by row
//   y  f32 [(down / pool) * (across / pool), width]: its squares of pool * pool tokens, row by row. Rows of both are
//      stride apart
//   bias, scale  f32 [width], only with STANDARDIZE
//
// All workgroups with the same y compute one row of y; an invocation computes one column, in a fixed order.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "memory.glsl"

layout(local_size_x = 64) in;

layout(constant_id = 0) const uint STANDARDIZE = 0;

layout(push_constant, std430) uniform Push {
    ReadFloats x;
    WriteFloats y;
    ReadFloats bias_or_none;
    ReadFloats scale_or_none;
    uint across;
    uint pool;
    uint width;
    uint stride;
    float factor;
};

void main() {
    const uint column = gl_GlobalInvocationID.x, square = gl_WorkGroupID.y;
    if (column >= width) return;
    const uint squares = across / pool, first = (square / squares * across + square % squares) * pool;
    float sum = 0.0;
    for (uint i = 0; i < pool; i++)
        for (uint j = 0; j < pool; j++) sum += x.at[(first + i * across + j) * stride + column];
    float mean = sum / float(pool * pool);
    if (STANDARDIZE == 1) mean = (mean * factor - bias_or_none.at[column]) * scale_or_none.at[column];
    y.at[square * stride + column] = mean;
}
