// Define WORKGROUP, the number of lanes of a workgroup, before including this. On a GPU each lane is an invocation. On
// a device that is a CPU (ON_CPU), invocations that wait for each other are slow. There a workgroup has as many
// invocations as a vector has elements, and each invocation acts as several lanes, one in each of TURNS turns. Sums
// keep their order, and so their bits.
#if defined(ON_CPU)
#define INVOCATIONS 8
#else
#define INVOCATIONS WORKGROUP
#endif
const uint TURNS = WORKGROUP / INVOCATIONS;

// The lane of this invocation in a turn.
uint lane_of(uint turn) { return turn * INVOCATIONS + gl_LocalInvocationID.x; }
