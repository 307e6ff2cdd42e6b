// Sums over a workgroup of WORKGROUP invocations (a power of two) in one fixed order, whatever the subgroup size.
shared float reduce_scratch[WORKGROUP];

float workgroup_sum(float value) {
    const uint i = gl_LocalInvocationID.x;
    reduce_scratch[i] = value;
    barrier();
    [[unroll]] for (uint half_size = WORKGROUP / 2; half_size > 0; half_size /= 2) {
        if (i < half_size) reduce_scratch[i] += reduce_scratch[i + half_size];
        barrier();
    }
    const float sum = reduce_scratch[0];
    barrier();
    return sum;
}

float workgroup_max(float value) {
    const uint i = gl_LocalInvocationID.x;
    reduce_scratch[i] = value;
    barrier();
    [[unroll]] for (uint half_size = WORKGROUP / 2; half_size > 0; half_size /= 2) {
        if (i < half_size) reduce_scratch[i] = max(reduce_scratch[i], reduce_scratch[i + half_size]);
        barrier();
    }
    const float maximum = reduce_scratch[0];
    barrier();
    return maximum;
}
