// Behind fast.glsl: a workgroup of WORKGROUP invocations quantizes 4 * WORKGROUP consecutive columns of a row, each
// invocation four of them, so that eight make a block.
layout(buffer_reference, std430, buffer_reference_align = 4) writeonly buffer WriteBlocks { uint at[]; };
layout(buffer_reference, std430, buffer_reference_align = 8) writeonly buffer WriteScales { uvec2 at[]; };

shared uint quantize_largest[WORKGROUP];
shared int quantize_sum[WORKGROUP];

// Columns `column`..`column` + 3 of row `row`, the same `column` modulo 4 * WORKGROUP as the invocation's number times
// four; values beyond `cols` must be 0. Every invocation of the workgroup calls it.
void quantize_four(WriteBlocks blocks, WriteScales scales, uint rows, uint row, uint column, uint cols, vec4 value) {
    const uint i = gl_LocalInvocationID.x, first = i & ~7u;
    quantize_largest[i] = magnitude(value);
    barrier();
    uint largest = quantize_largest[first];
    [[unroll]] for (uint j = 1; j < 8; j++) largest = max(largest, quantize_largest[first + j]);
    const ivec4 q = ivec4(quantized(value.x, largest), quantized(value.y, largest), quantized(value.z, largest),
                          quantized(value.w, largest));
    quantize_sum[i] = q.x + q.y + q.z + q.w;
    barrier();
    const uint block = column / BLOCK_COLS;
    if (block < (cols + BLOCK_COLS - 1) / BLOCK_COLS) {
        const uint to = block * rows + row;
        blocks.at[to * 8 + (i & 7u)] = packed_four(q);
        if (i == first) {
            int low = 0, high = 0;
            [[unroll]] for (uint j = 0; j < 4; j++) {
                low += quantize_sum[first + j];
                high += quantize_sum[first + 4 + j];
            }
            scales.at[to] = uvec2(floatBitsToUint(scale_of(largest)), uint(low & 0xffff) | uint(high) << 16);
        }
    }
    barrier();
}
