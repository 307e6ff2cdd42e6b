// y[p, c] = the mean of x[t, c] over the tokens t of square p
//
//   x  f32 [side * side, width]: a grid of tokens, row by row
//   y  f32 [(side / pool)^2, width]: its squares of pool * pool tokens, row by row. Rows of both are stride apart
//
// All workgroups with the same y compute one row of y; an invocation computes one column, in a fixed order.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "memory.glsl"

layout(local_size_x = 64) in;

layout(push_constant, std430) uniform Push {
    ReadFloats x;
    WriteFloats y;
    uint side;
    uint pool;
    uint width;
    uint stride;
};

void main() {
    const uint column = gl_GlobalInvocationID.x, square = gl_WorkGroupID.y;
    if (column >= width) return;
    const uint across = side / pool, first = (square / across * side + square % across) * pool;
    float sum = 0.0;
    for (uint i = 0; i < pool; i++)
        for (uint j = 0; j < pool; j++) sum += x.at[(first + i * side + j) * stride + column];
    y.at[square * stride + column] = sum / float(pool * pool);
}
