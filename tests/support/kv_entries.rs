//! Entries of a folder of conversations whose contents follow from a number. The example `kv_writer` uses this file too.

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use unicorn::kv_disk::Address;

/// The content of entry `n`.
pub fn contents(n: u64) -> (Address, Vec<u8>) {
    let mut rng = ChaCha8Rng::seed_from_u64(n);
    let address = Address::new(rng.random());
    let length = rng.random_range(0..3 << 20);
    // Random bytes take long without optimization, so few are repeated.
    let mut pattern = vec![0; 1021];
    rng.fill(&mut pattern[..]);
    let mut bytes = pattern.repeat(length / pattern.len() + 1);
    bytes.truncate(length);
    (address, bytes)
}
