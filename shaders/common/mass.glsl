// Probabilities as integers, which add up the same in any order: in units of 2^-40 of the most likely id's. Everything here is
// exact or an operation that Vulkan rounds correctly, so every device has the same masses, and so has their twin
// (tests/reference.rs).

// The temperature that a request is drawn with: colder is as good as 0, hotter makes all alike, and beyond either no
// finite number might be left.
float bounded(float temperature) { return clamp(temperature, 1e-6, 1e28); }

// 1 / x to the nearest, of a `bounded` x: Vulkan's division is not exact.
float reciprocal(float x) {
    const uint bits = floatBitsToUint(x);
    const uint divisor = (bits & 0x7fffffu) | 0x800000u;
    // 2^48 / divisor, more than 2^24 and at most 2^25, a bit at a time; the last bit rounds.
    uint quotient = 0, rest = 1u << 23;
    for (uint i = 0; i < 26; i++) {
        quotient *= 2;
        if (rest >= divisor) {
            rest -= divisor;
            quotient |= 1;
        }
        rest *= 2;
    }
    // The second factor is the power of two that the last bit of the first one stands for.
    return float(quotient / 2 + (quotient & 1)) * uintBitsToFloat((230 - (bits >> 23)) << 23);
}

// What is this many powers of two below the most likely id has no mass, and is never drawn: noise reaches from -4.3 to 22.9,
// which is 39.1 powers of two.
const float WEIGHTLESS = 40.0;

uint high_product(uint a, uint b) {
    uint high, low;
    umulExtended(a, b, high, low);
    return high;
}

// 2^-t of 0 <= t < WEIGHTLESS: the 20 bits at the bottom, and the 20 above them, of which 4096 of either fit 32 bits.
// At least 1, and at most 2^40 - 2^9.
uvec2 mass(float t) {
    const uint whole = uint(t);
    const uint x = uint((t - float(whole)) * 2147483648.0) * 2;
    // 1 - 2^-x in units of 2^-32, by a polynomial through both ends that is 3e-9 off at most.
    uint y = 469656u;
    y = 5479739u - high_product(y, x);
    y = 41148157u - high_product(y, x);
    y = 238334300u - high_product(y, x);
    y = 1031756616u - high_product(y, x);
    y = 2977044038u - high_product(y, x);
    y = high_product(y, x);
    const uint power = min(0x80000000u - y / 2, 0x7fffffffu);
    const uint low = whole <= 9 ? power << (9 - whole) : power >> (whole - 9);
    return uvec2(low & 0xfffffu, whole <= 20 ? power >> (whole + 11) : 0);
}

// 64 bits are two words, the lower one first.
uvec2 add64(uvec2 a, uvec2 b) {
    uint carry;
    const uint low = uaddCarry(a.x, b.x, carry);
    return uvec2(low, a.y + b.y + carry);
}

uvec2 subtract64(uvec2 a, uvec2 b) {
    uint borrow;
    const uint low = usubBorrow(a.x, b.x, borrow);
    return uvec2(low, a.y - b.y - borrow);
}

bool less64(uvec2 a, uvec2 b) { return a.y < b.y || (a.y == b.y && a.x < b.x); }

// Sums of the two parts of masses as one number.
uvec2 joined(uvec2 parts) { return add64(uvec2(parts.x, 0), uvec2(parts.y << 20, parts.y >> 12)); }

// The mass that top_p wants of so much: top_p in units of 2^-24, and less than 1.
uvec2 share(uvec2 mass, float top_p) {
    const uint part = uint(clamp(top_p, 0.0, 1.0) * 16777216.0);
    uint word0, word1, word2, above, carry;
    umulExtended(mass.x, part, above, word0);
    umulExtended(mass.y, part, word2, word1);
    word1 = uaddCarry(word1, above, carry);
    word2 += carry;
    return uvec2(word0 >> 24 | word1 << 8, word1 >> 24 | word2 << 8);
}
