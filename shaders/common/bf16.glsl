// Converts to bf16 (the upper half of an f32), rounded to nearest, ties to even. Infinities and NaNs are preserved.
uint bf16(float value) {
    const uint bits = floatBitsToUint(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return bits >> 16 | 0x40u;
    return bits + 0x7fffu + (bits >> 16 & 1u) >> 16;
}

// Packs four numbers in memory order.
uvec2 bf16_four(vec4 four) {
    return uvec2(bf16(four.x) | bf16(four.y) << 16, bf16(four.z) | bf16(four.w) << 16);
}
