// history[slot(t), position(t)] = id(t): stores the ids of each slot's sequence, for penalties.
//
//   ids          [tokens]: a token id, or 1 << 31 | slot for the id last sampled in that slot
//   positions    [tokens]
//   sequence_of  [tokens]: index into slots
//   history      [*, slot_len]
//
// Each invocation writes the id of one token. The device does this, because the host may not know the sampled ids yet.
#version 460
#extension GL_GOOGLE_include_directive : require
#include "memory.glsl"

layout(local_size_x = 64) in;

layout(push_constant, std430) uniform Push {
    ReadUints ids;
    ReadUints sampled;
    ReadUints positions;
    ReadUints sequence_of;
    ReadUints slots;
    WriteUints history;
    uint tokens;
    uint slot_len;
};

void main() {
    const uint token = gl_GlobalInvocationID.x;
    if (token >= tokens) return;
    uint id = ids.at[token];
    if (id >> 31 != 0) id = sampled.at[id & 0x7fffffffu];
    history.at[slots.at[sequence_of.at[token]] * slot_len + positions.at[token]] = id;
}
