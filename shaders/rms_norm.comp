// norm(x)[i] = x[i] / sqrt(mean(x^2) + eps) * (1 + weight[i])          (Gemma's RMSNorm: 1 + w, not w)
//
//   default  y[t] = norm(x[t])
//   ADD      y[t] += norm(x[t])              (the residual add behind a post-norm)
//   GATHER   y[i] = norm(x[rows[i]])         (the final norm, of the rows that are sampled from)
//
//   x f32 [*, dim], rows x_stride apart; y f32, rows y_stride apart; weight f32 [dim]. A workgroup takes one row.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "memory.glsl"
#define WORKGROUP 256
#include "reduce.glsl"

layout(local_size_x = WORKGROUP) in;

layout(push_constant, std430) uniform Push {
    ReadFloats x;
    ReadFloats weight;
#if defined(ADD)
    Floats y;
#else
    WriteFloats y;
#endif
    ReadUints rows;
    uint dim;
    uint x_stride;
    uint y_stride;
    float eps;
};

void main() {
    const uint out_row = gl_WorkGroupID.x;
#if defined(GATHER)
    const uint in_row = rows.at[out_row];
#else
    const uint in_row = out_row;
#endif
    float squares = 0.0;
    for (uint i = gl_LocalInvocationID.x; i < dim; i += WORKGROUP) {
        const float v = x.at[in_row * x_stride + i];
        squares = fma(v, v, squares);
    }
    const float factor = inversesqrt(workgroup_sum(squares) / float(dim) + eps);
    for (uint i = gl_LocalInvocationID.x; i < dim; i += WORKGROUP) {
        const float normed = x.at[in_row * x_stride + i] * factor * weight.at[i];
#if defined(ADD)
        y.at[out_row * y_stride + i] += normed;
#else
        y.at[out_row * y_stride + i] = normed;
#endif
    }
}
