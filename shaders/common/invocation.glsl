// Numbers the invocations of a workgroup so that the invocations of a subgroup are neighbours. Vulkan does not say which
// gl_LocalInvocationIndex a subgroup has. Subgroups must be full, and their number must be a power of two.
#extension GL_KHR_shader_subgroup_basic : require
#extension GL_KHR_shader_subgroup_ballot : require

uint own_invocation() {
    // The number of subgroups gives their size. lavapipe with vectors of 1024 bits reports 32 in gl_SubgroupSize, and
    // has subgroups of 16.
    const int all = findMSB(gl_WorkGroupSize.x * gl_WorkGroupSize.y);
    return (gl_SubgroupID << (all - findMSB(gl_NumSubgroups))) + gl_SubgroupInvocationID;
}

// The group of `size` neighbouring invocations that this one is in. A subgroup must be inside one group: the broadcast
// lets the compiler know that, so that it loads what a group shares once.
uint own_group(uint size) { return subgroupBroadcastFirst(own_invocation()) / size; }
