// Changes the logits of a few ids: first penalties, then biases. The raw logits are not overwritten. Changes are
// written to `adjusted`, which has a word for each logit (common/draws.glsl). Words that no request changes are 0, and
// after `clear` all words are 0.
//
//   logits    f32 [rows, *], rows stride apart       adjusted  u32 [rows, *], rows stride apart
//   history   u32 [slots, slot_len]                   bias      (u32 id, f32) pairs, no id twice in one request
//
//   count     records for each id of a request's history whether the prompt has it, and how many times the answer has
//             it. It uses integer atomics, so the order does not matter
//   penalize  if the prompt or the answer has the id, divides a positive logit by the repetition penalty, and
//             multiplies any other logit. Subtracts the frequency penalty for each time that the answer has the id, and
//             the presence penalty once
//   bias      adds a bias; a bias of -infinity forbids the id
//   clear     sets all changed words back to 0
//
// All workgroups with the same y process one row. Each invocation processes positions (or pairs) with a fixed stride.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "memory.glsl"
#include "draws.glsl"

layout(local_size_x = 256) in;

struct Pair {
    uint id;
    float bias;
};
layout(buffer_reference, std430, buffer_reference_align = 4) readonly buffer Pairs { Pair at[]; };

layout(push_constant, std430) uniform Push {
    ReadFloats logits;
    Words adjusted;
    Requests requests;
    ReadUints history;
    Pairs bias;
    uint stride;
    uint slot_len;
};

void main() {
    const uint row = gl_WorkGroupID.y, first = gl_GlobalInvocationID.x;
    const uint step_size = gl_NumWorkGroups.x * gl_WorkGroupSize.x;
    const uint base = row * stride;
    const Request request = requests.at[row];

#ifndef BIAS
    for (uint i = first; i < request.history_len; i += step_size) {
        const uint at = base + history.at[request.history_slot * slot_len + i];
#if defined(COUNT)
        if (i < request.prompt_len) atomicOr(adjusted.at[at], PROMPT);
        else atomicAdd(adjusted.at[at], 1);
#elif defined(PENALIZE)
        const uint word = atomicOr(adjusted.at[at], 0);
        // The first invocation that reads an id's word changes it. Invocations that read it at the same time compute
        // the same value.
        if (word < FIRST_CHANGED) {
            const uint count = word & (PROMPT - 1);
            float logit = logits.at[at];
            logit = logit > 0.0 ? logit / request.repetition : logit * request.repetition;
            logit -= request.frequency * float(count);
            if (count > 0) logit -= request.presence;
            atomicExchange(adjusted.at[at], changed(logit));
        }
#else
        adjusted.at[at] = 0;
#endif
    }
#endif
#if defined(BIAS) || defined(CLEAR)
    for (uint i = first; i < request.biases; i += step_size) {
        const Pair pair = bias.at[request.first_bias + i];
        const uint at = base + pair.id;
#ifdef BIAS
        const bool forbidden = floatBitsToUint(pair.bias) == 0xff800000u;
        const float logit = adjusted_logit(adjusted.at[at], logits.at[at]);
        adjusted.at[at] = changed(forbidden ? FORBIDDEN : logit + pair.bias);
#else
        adjusted.at[at] = 0;
#endif
    }
#endif
}
