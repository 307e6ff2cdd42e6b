// Include after reduce.glsl. Finds the id with the largest value in a workgroup; among equal values, the lowest id.
// Each invocation passes the best value of its own ids.
shared uint best_ids[WORKGROUP];

uint workgroup_argmax(float value, uint id) {
    const uint i = gl_LocalInvocationID.x;
    reduce_scratch[i] = value;
    best_ids[i] = id;
    barrier();
    for (uint half_size = WORKGROUP / 2; half_size > 0; half_size /= 2) {
        if (i < half_size) {
            const float other = reduce_scratch[i + half_size];
            const uint other_id = best_ids[i + half_size];
            if (other > reduce_scratch[i] || (other == reduce_scratch[i] && other_id < best_ids[i])) {
                reduce_scratch[i] = other;
                best_ids[i] = other_id;
            }
        }
        barrier();
    }
    const uint best = best_ids[0];
    barrier();
    return best;
}
