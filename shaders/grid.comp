// y[p] = of_columns[x(p)] + of_rows[y(p)], or that added to y[p] with ADD, where x and y are the column and the row of
// position p in a grid
//
//   of_columns, of_rows  f32 [as many positions as a side has at most, width]
//   y                    f32 [down * across, width]: a grid, row by row. Rows of all are stride apart
//
// All workgroups with the same y compute one row of y; an invocation computes one column.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "memory.glsl"

layout(local_size_x = 64) in;

layout(constant_id = 0) const uint ADD = 0;

layout(push_constant, std430) uniform Push {
    ReadFloats of_columns;
    ReadFloats of_rows;
    Floats y;
    uint across;
    uint width;
    uint stride;
};

void main() {
    const uint column = gl_GlobalInvocationID.x, position = gl_WorkGroupID.y;
    if (column >= width) return;
    const uint at = position * stride + column;
    const float sum = of_columns.at[position % across * stride + column] + of_rows.at[position / across * stride + column];
    y.at[at] = ADD == 1 ? y.at[at] + sum : sum;
}
