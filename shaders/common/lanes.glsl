// Define WORKGROUP, the number of lanes of a workgroup, before including this. On a GPU each lane is an invocation. On
// a CPU device (ON_CPU), barriers between invocations are slow. There a workgroup has only as many invocations as a
// SIMD vector has elements, and each invocation acts as TURNS lanes, one after the other. The order of sums is the
// same, so the results have the same bits.
#if defined(ON_CPU)
#define INVOCATIONS 8
#else
#define INVOCATIONS WORKGROUP
#endif
const uint TURNS = WORKGROUP / INVOCATIONS;

// The lane of this invocation in a turn.
uint lane_of(uint turn) { return turn * INVOCATIONS + gl_LocalInvocationID.x; }
