// The log probability of the id that was drawn, and the most likely ids with theirs, for the rows that want them.
//
//   logits  f32 [rows, *], rows logits_stride apart: the model's own, before penalties, temperature and the rest;
//           ids >= vocab are padding
//   ids     [rows]: what was drawn
//   out     [rows, out_stride]: the f32 of ids[row], then pairs of id and f32, the most likely first, ties to the lowest
//           id; an id of 0xffffffff stands where the vocabulary has no more
//
// A workgroup takes one row; its sum has one order.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "memory.glsl"
#define WORKGROUP 256
#include "reduce.glsl"
#include "argmax.glsl"
#include "draws.glsl"

layout(local_size_x = WORKGROUP) in;

layout(push_constant, std430) uniform Push {
    ReadFloats logits;
    Requests requests;
    ReadUints ids;
    WriteUints result;
    uint vocab;
    uint logits_stride;
    uint out_stride;
};

void main() {
    const uint lane = gl_LocalInvocationID.x, row = gl_WorkGroupID.x;
    const uint base = row * logits_stride, result_base = row * out_stride;
    const uint wanted = requests.at[row].logprobs, drawn = ids.at[row];
    if (wanted == 0 || drawn == NONE) return;

    float best = LOWEST;
    for (uint i = lane; i < vocab; i += WORKGROUP) best = max(best, logits.at[base + i]);
    const float maximum = workgroup_max(best);
    float sum = 0.0;
    for (uint i = lane; i < vocab; i += WORKGROUP) sum += exp(logits.at[base + i] - maximum);
    const float log_sum = log(workgroup_sum(sum));
    if (lane == 0) result.at[result_base] = floatBitsToUint(logits.at[base + drawn] - maximum - log_sum);

    // The best of those that come behind the last one.
    float last = HIGHEST;
    uint last_id = 0;
    for (uint n = 0; n + 1 < wanted; n++) {
        best = LOWEST;
        uint best_id = NONE;
        for (uint i = lane; i < vocab; i += WORKGROUP) {
            const float logit = logits.at[base + i];
            const bool behind = logit < last || (logit == last && i > last_id);
            if (behind && (logit > best || best_id == NONE)) {
                best = logit;
                best_id = i;
            }
        }
        last_id = workgroup_argmax(best, best_id);
        last = last_id == NONE ? LOWEST : logits.at[base + last_id];
        if (lane == 0) {
            result.at[result_base + 1 + 2 * n] = last_id;
            result.at[result_base + 2 + 2 * n] = floatBitsToUint(last - maximum - log_sum);
        }
    }
}
