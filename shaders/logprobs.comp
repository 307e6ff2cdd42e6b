// The log probability of the drawn id, and the most likely ids with their log probabilities, for the rows that request
// them.
//
//   logits  f32 [rows, *], rows logits_stride apart: the model's raw logits, before penalties, temperature and filters;
//           ids >= vocab are padding
//   ids     [rows]: the drawn ids
//   parts   [rows, chunks, PART]: for each chunk of CHUNK ids, its highest logit and the sum of exponentials relative
//           to it (f32), and MOST pairs of its most likely ids and their logits; the id is 0xffffffff if the chunk has
//           no more ids
//   out     [rows, out_stride]: the log probability of ids[row], then pairs of id and log probability, the most
//           likely first, the lowest id first among equals; the id is 0xffffffff if the vocabulary has no more ids
//
//   PARTS   a workgroup processes a chunk of a row
//   MERGE   a workgroup processes a row, and an invocation a chunk
//
// The order of a row's sum is fixed by the chunks.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "memory.glsl"
#define WORKGROUP 256
#include "lanes.glsl"
#include "reduce.glsl"
#include "argmax.glsl"
#include "draws.glsl"

layout(local_size_x = WORKGROUP) in;

const uint CHUNK = 4096;
const uint MOST = 20;
const uint PART = 2 + 2 * MOST;

#ifdef PARTS
#define PartsOf WriteUints
#else
#define PartsOf ReadUints
#endif

layout(push_constant, std430) uniform Push {
    ReadFloats logits;
    Requests requests;
    ReadUints ids;
    PartsOf parts;
    WriteUints result;
    uint vocab;
    uint logits_stride;
    uint out_stride;
};

uint chunks() { return (vocab + CHUNK - 1) / CHUNK; }

#ifdef PARTS
const uint OWN = CHUNK / WORKGROUP;

void main() {
    const uint lane = gl_LocalInvocationID.x, chunk = gl_WorkGroupID.x, row = gl_WorkGroupID.y;
    const uint wanted = requests.at[row].logprobs;
    if (wanted == 0) return;
    const uint base = row * logits_stride, first = chunk * CHUNK + lane, part = (row * chunks() + chunk) * PART;

    // Ids beyond the vocabulary count as the lowest logit.
    float own[OWN];
    float best = LOWEST;
    [[unroll]] for (uint i = 0; i < OWN; i++) {
        const uint id = first + i * WORKGROUP;
        own[i] = id < vocab ? logits.at[base + id] : LOWEST;
        best = max(best, own[i]);
    }
    share(lane, best);
    const float maximum = workgroup_max();
    float sum = 0.0;
    [[unroll]] for (uint i = 0; i < OWN; i++) {
        if (first + i * WORKGROUP < vocab) sum += exp(own[i] - maximum);
    }
    share(lane, sum);
    sum = workgroup_sum();
    if (lane == 0) {
        parts.at[part] = floatBitsToUint(maximum);
        parts.at[part + 1] = floatBitsToUint(sum);
    }

    // Finds the best of the remaining ids, repeatedly. Only the invocation that had the last best id searches its own
    // ids for its next best one.
    uint left = (1u << OWN) - 1, best_id = NONE;
    bool looks = true;
    for (uint n = 0; n + 1 < wanted; n++) {
        if (looks) {
            best = LOWEST;
            best_id = NONE;
            [[unroll]] for (uint i = 0; i < OWN; i++) {
                const uint id = first + i * WORKGROUP;
                if (id < vocab && (left >> i & 1) != 0 && (best_id == NONE || own[i] > best)) {
                    best = own[i];
                    best_id = id;
                }
            }
        }
        const uint id = workgroup_argmax(best, best_id);
        looks = id == best_id && id != NONE;
        if (looks) {
            left &= ~(1u << ((id - first) / WORKGROUP));
            parts.at[part + 2 + 2 * n] = id;
            parts.at[part + 3 + 2 * n] = floatBitsToUint(best);
        }
        if (id == NONE && lane == 0) parts.at[part + 2 + 2 * n] = NONE;
    }
}

#else
void main() {
    const uint lane = gl_LocalInvocationID.x, row = gl_WorkGroupID.x;
    const uint base = row * logits_stride, result_base = row * out_stride;
    const uint wanted = requests.at[row].logprobs, drawn = ids.at[row];
    if (wanted == 0 || drawn == NONE) return;

    const bool is_one = lane < chunks();
    const uint part = (row * chunks() + lane) * PART;
    const float own = is_one ? uintBitsToFloat(parts.at[part]) : LOWEST;
    share(lane, own);
    const float maximum = workgroup_max();
    const float sum = is_one ? uintBitsToFloat(parts.at[part + 1]) * exp(own - maximum) : 0.0;
    share(lane, sum);
    const float log_sum = log(workgroup_sum());
    if (lane == 0) result.at[result_base] = floatBitsToUint(logits.at[base + drawn] - maximum - log_sum);

    // The list of each chunk is sorted, so the best remaining id is the first remaining id of some chunk.
    uint taken = 0;
    for (uint n = 0; n + 1 < wanted; n++) {
        const bool has_more = is_one && taken + 1 < wanted;
        const uint best_id = has_more ? parts.at[part + 2 + 2 * taken] : NONE;
        const float best = best_id != NONE ? uintBitsToFloat(parts.at[part + 3 + 2 * taken]) : LOWEST;
        const uint id = workgroup_argmax(best, best_id);
        if (id == best_id && id != NONE) {
            taken += 1;
            result.at[result_base + 1 + 2 * n] = id;
            result.at[result_base + 2 + 2 * n] = floatBitsToUint(best - maximum - log_sum);
        }
        if (id == NONE && lane == 0) {
            result.at[result_base + 1 + 2 * n] = NONE;
            result.at[result_base + 2 + 2 * n] = floatBitsToUint(LOWEST - maximum - log_sum);
        }
    }
}
#endif
