// Loads of values that all invocations need, for the kernels of a CPU device (ON_CPU).
//
// There, a load of one value for all invocations takes as long as a load of a value for each. So of four neighbouring
// values, each invocation loads one, and gets the others by broadcasts. All invocations must be active, and a subgroup
// must have at least four of them, as on every CPU device.
#extension GL_KHR_shader_subgroup_basic : require
#extension GL_KHR_shader_subgroup_ballot : require

// Which of four values this invocation loads.
uint own_of_four() { return gl_SubgroupInvocationID % 4; }

// The four values, of which this invocation has loaded its own.
vec4 all_four(float own) {
    return vec4(subgroupBroadcast(own, 0), subgroupBroadcast(own, 1), subgroupBroadcast(own, 2), subgroupBroadcast(own, 3));
}
void all_four(vec4 own, out vec4 all[4]) {
    all = vec4[](subgroupBroadcast(own, 0), subgroupBroadcast(own, 1), subgroupBroadcast(own, 2), subgroupBroadcast(own, 3));
}
uvec2 both(uint own) { return uvec2(subgroupBroadcast(own, 0), subgroupBroadcast(own, 1)); }
