// Include after lanes.glsl. Sums and maxima over the WORKGROUP lanes (a power of four), in one fixed order that does
// not depend on the subgroup size. Each round combines four values, because each round costs a barrier.
shared float reduce_scratch[WORKGROUP];

void share(uint lane, float value) { reduce_scratch[lane] = value; }

// The sum of the shared numbers. Call it after every lane has called share.
float workgroup_sum() {
    barrier();
    [[unroll]] for (uint part = WORKGROUP / 4; part > 0; part /= 4) {
        for (uint turn = 0; turn * INVOCATIONS < part; turn++) {
            const uint i = lane_of(turn);
            if (i < part)
                reduce_scratch[i] = (reduce_scratch[i] + reduce_scratch[i + part]) +
                                    (reduce_scratch[i + 2 * part] + reduce_scratch[i + 3 * part]);
        }
        barrier();
    }
    const float sum = reduce_scratch[0];
    barrier();
    return sum;
}

float workgroup_max() {
    barrier();
    [[unroll]] for (uint part = WORKGROUP / 4; part > 0; part /= 4) {
        for (uint turn = 0; turn * INVOCATIONS < part; turn++) {
            const uint i = lane_of(turn);
            if (i < part)
                reduce_scratch[i] = max(max(reduce_scratch[i], reduce_scratch[i + part]),
                                        max(reduce_scratch[i + 2 * part], reduce_scratch[i + 3 * part]));
        }
        barrier();
    }
    const float maximum = reduce_scratch[0];
    barrier();
    return maximum;
}
