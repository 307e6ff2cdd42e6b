// Include after fast.glsl and lanes.glsl. The invocations of a workgroup quantize consecutive columns of a row. Each
// processes four columns, so eight invocations process a block. Their number must be a multiple of eight.
layout(buffer_reference, std430, buffer_reference_align = 4) writeonly buffer WriteBlocks { uint at[]; };
layout(buffer_reference, std430, buffer_reference_align = 8) writeonly buffer WriteScales { uvec2 at[]; };

shared uint quantize_largest[INVOCATIONS];
shared ivec2 quantize_sum[INVOCATIONS];

// The largest magnitude of a block. This function and quantize_block_sums must be called alternately. The barrier in
// one of them guarantees that all invocations have read the shared array of the other, so that array can be written
// again without another barrier.
uint quantize_block_largest(vec4 value) {
    const uint i = gl_LocalInvocationID.x, first = i & ~7u;
    quantize_largest[i] = magnitude(value);
    barrier();
    uint largest = quantize_largest[first];
    [[unroll]] for (uint j = 1; j < 8; j++) largest = max(largest, quantize_largest[first + j]);
    return largest;
}

// The sums of a block: of the q in its first half, of the q in its second half, and of all |q|.
ivec3 quantize_block_sums(ivec4 q) {
    const uint i = gl_LocalInvocationID.x, first = i & ~7u;
    const ivec4 magnitudes = abs(q);
    quantize_sum[i] = ivec2(q.x + q.y + q.z + q.w, magnitudes.x + magnitudes.y + magnitudes.z + magnitudes.w);
    barrier();
    ivec3 sums = ivec3(0);
    [[unroll]] for (uint j = 0; j < 8; j++) {
        const ivec2 one = quantize_sum[first + j];
        sums += j < 4 ? ivec3(one.x, 0, one.y) : ivec3(0, one);
    }
    return sums;
}

ivec4 quantized_four(vec4 value, uint largest) {
    return ivec4(quantized(value.x, largest), quantized(value.y, largest), quantized(value.z, largest),
                 quantized(value.w, largest));
}

// Quantizes columns `column`..`column` + 3 of row `row`. `column` modulo 4 * INVOCATIONS must be four times the
// invocation's number, and values beyond `cols` must be 0. All invocations of the workgroup must call it. `rows` is the
// number of rows, including padding, in the planes of both digits.
void quantize_four(WriteBlocks blocks, WriteScales scales, uint rows, uint row, uint column, uint cols, vec4 value) {
    const uint i = gl_LocalInvocationID.x;
    const uint block = column / BLOCK_COLS, block_count = (cols + BLOCK_COLS - 1) / BLOCK_COLS;
    const bool is_one = block < block_count, is_first = (i & 7u) == 0;
    const uint to = block * rows + row, second = to + block_count * rows;

    uint largest = quantize_block_largest(value);
    ivec4 q = quantized_four(value, largest);
    ivec3 sums = quantize_block_sums(q);
    const float scale = scale_of(largest);
    const bool has_second = needs_second(largest, sums.z);
    if (is_one) {
        blocks.at[to * 8 + (i & 7u)] = packed_four(q);
        if (is_first) scales.at[to] = uvec2(flagged(scale, has_second), packed_sums(sums.x, sums.y));
    }

    value = fma(-vec4(q), vec4(scale), value);
    largest = quantize_block_largest(value);
    q = quantized_four(value, largest);
    sums = quantize_block_sums(q);
    if (is_one) {
        if (has_second) blocks.at[second * 8 + (i & 7u)] = packed_four(q);
        if (is_first) {
            const uvec2 record = uvec2(floatBitsToUint(scale_of(largest)), packed_sums(sums.x, sums.y));
            scales.at[second] = has_second ? record : uvec2(0);
        }
    }
}
