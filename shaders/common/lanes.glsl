// A workgroup has WORKGROUP lanes, to be defined before. On a GPU each of them is an invocation. On a device that is a CPU
// (ON_CPU), invocations that wait for each other are slow. There a workgroup has as many invocations as a vector has elements,
// and each of them is several lanes, one in each of TURNS turns: in the same order of sums, so with the same bits.
#if defined(ON_CPU)
#define INVOCATIONS 8
#else
#define INVOCATIONS WORKGROUP
#endif
const uint TURNS = WORKGROUP / INVOCATIONS;

// The lane that an invocation is in a turn.
uint lane_of(uint turn) { return turn * INVOCATIONS + gl_LocalInvocationID.x; }
