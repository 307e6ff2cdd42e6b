//! Writes entries to a folder of conversations until it is killed: `kv_writer FOLDER SEED`. The content of an entry follows
//! from its address, so a test can check what is left.

use std::path::Path;

#[path = "../support/kv_entries.rs"]
mod kv_entries;

use kv_entries::contents;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use unicorn::kv_disk::KvStore;

fn main() {
    let mut arguments = std::env::args().skip(1);
    let (folder, seed) = (arguments.next().expect("a folder"), arguments.next().expect("a seed"));
    // Less than what is written, so that entries are evicted too.
    let store = KvStore::open(Path::new(&folder), 32 << 20).expect("opens");
    println!("open");
    let mut rng = ChaCha8Rng::seed_from_u64(seed.parse().expect("a number"));
    loop {
        let (address, bytes) = contents(rng.random_range(0..60));
        let length = bytes.len();
        store.write(address, bytes, store.now());
        store.read(&address, length, store.now());
    }
}
