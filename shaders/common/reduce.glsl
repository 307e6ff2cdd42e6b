// Sums and maxima over a workgroup of WORKGROUP invocations (a power of four) in one fixed order, whatever the subgroup size:
// four by four, as each round waits for all of them.
shared float reduce_scratch[WORKGROUP];

float workgroup_sum(float value) {
    const uint i = gl_LocalInvocationID.x;
    reduce_scratch[i] = value;
    barrier();
    [[unroll]] for (uint part = WORKGROUP / 4; part > 0; part /= 4) {
        if (i < part)
            reduce_scratch[i] = (reduce_scratch[i] + reduce_scratch[i + part]) +
                                (reduce_scratch[i + 2 * part] + reduce_scratch[i + 3 * part]);
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
    [[unroll]] for (uint part = WORKGROUP / 4; part > 0; part /= 4) {
        if (i < part)
            reduce_scratch[i] = max(max(reduce_scratch[i], reduce_scratch[i + part]),
                                    max(reduce_scratch[i + 2 * part], reduce_scratch[i + 3 * part]));
        barrier();
    }
    const float maximum = reduce_scratch[0];
    barrier();
    return maximum;
}
