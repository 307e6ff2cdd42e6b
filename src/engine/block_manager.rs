//! The pools of KV blocks, the sequences' block tables, and the prefix cache.
//!
//! There is one pool for each group of layers ([`KvLimits::pools`]). The layers of a pool without a window need every
//! token of a sequence, the layers of a pool with a window only the last ones. The [`BlockTable`] of a sequence has a
//! block of each pool for every `block_size` positions. Blocks before a pool's window are released while the sequence
//! runs.
//!
//! ```text
//! positions     0   16   32   48   64   80        at position 80
//! no window     a0 | a1 | a2 | a3 | a4 |
//! window of 32   -    -  | b2 | b3 | b4 |
//! ```
//!
//! A block whose tokens are all computed is *registered*: it becomes part of a [`Node`] of the prefix cache. A node is
//! found by its salt, its tokens, and all tokens before them. Registered blocks are never written again. All sequences
//! of that salt that start with the same tokens share them. They stay in the cache after the last such sequence ends,
//! until their room is needed. No sequence can find out what other salts have, nor whether a text is cached there.
//!
//! The tokens of an image see each other in both directions, so the keys and values of each of them depend on the
//! whole image. Its ids say nothing about it. So a node is found by the images in its block too: by their whole hashes,
//! and by where they lie ([`ImagePart`]). A prefix may end within an image: what is cached of it was computed together
//! with the rest, of the same image.
//!
//! A cache hit at position `p` needs the blocks of each pool that the token at `p` sees: all of them in a pool without a
//! window. A missing block cannot be computed from the window alone, because each layer depends on earlier layers, whose
//! windows reach further back.
//!
//! If the logits of a text are not finite, any of its blocks may be wrong. So the cache drops the text from its first
//! block on, with all texts that begin with that block ([`BlockManager::forget`]).
//!
//! The order of eviction: blocks that only background sequences have used are evicted first. So background sequences
//! take room from each other before they take it from interactive ones. Of blocks of equal priority, a pool without a
//! window evicts the least recently used node without children, with its blocks of every pool. A pool with a window
//! evicts blocks in which no turn of a conversation ended first, and then those of the oldest turn.
//!
//! Invariants, checked by [`BlockManager::check`]:
//!
//! - A block is free, cached (registered, but in no table) or held (in a table). Its count of holders is the number of
//!   tables that have it.
//! - The first pool has no window. Pools without a window have the same nodes, held by the same tables.
//! - A table that has a block of a pool without a window has all blocks before it.
//! - A node has a block of each pool without a window.
//! - Tables that share a block have the same salt.
//! - All blocks before a block that an interactive sequence has used were also used by an interactive sequence.

use std::cmp::Reverse;
use std::collections::hash_map::RandomState;
use std::collections::{BTreeSet, HashMap, VecDeque};
use std::hash::BuildHasher;

use sha2::{Digest as _, Sha256};

use super::request::{CacheSalt, ImageHash, Priority, PromptImage};
use crate::model::{BlockCopy, BlockList, KvLimits, KvPool, first_seen};

/// The blocks of one sequence. [`BlockManager::admit`] creates a table, and [`BlockManager::release`] frees its blocks.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct BlockTable {
    /// The blocks of each pool.
    blocks: Vec<BlockList>,
    /// The nodes of the registered blocks, from position 0 on.
    nodes: Vec<NodeId>,
    /// The priority and the salt of the sequence.
    priority: Priority,
    salt: CacheSalt,
    /// Whether the cache dropped the text. Its blocks are not registered from then on.
    forgotten: bool,
}

impl BlockTable {
    /// The blocks of each pool, without those before its window.
    pub fn blocks(&self) -> &[BlockList] {
        &self.blocks
    }

    pub(super) fn salt(&self) -> &CacheSalt {
        &self.salt
    }

    /// The parent of the next block to be registered.
    fn next_parent(&self) -> Parent {
        self.nodes.last().map_or_else(|| Parent::Root(self.salt.clone()), |id| Parent::Node(*id))
    }

    /// The block of position 0 in the first pool.
    fn first_block(&self) -> Option<u32> {
        self.blocks.first().and_then(|list| list.get(0))
    }
}

type NodeId = u32;

/// What comes before a block in the prefix cache.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Parent {
    /// Nothing: the block begins a text with this salt. All descendants have the same salt.
    Root(CacheSalt),
    /// The block of another node.
    Node(NodeId),
}

impl Parent {
    fn node(&self) -> Option<NodeId> {
        match self {
            Parent::Root(_) => None,
            Parent::Node(id) => Some(*id),
        }
    }
}

/// The part of an image in a block. It ends with the image or with the block, and images with the same hash have the same
/// number of tokens, so its length is known from its beginning.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct ImagePart {
    image: ImageHash,
    /// The index of the part's first token in the block.
    offset: usize,
    /// The index of the part's first token in the image.
    row: usize,
}

/// What a block is computed from, together with all tokens before: the tokens of its positions, and the images there.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct BlockText<'a> {
    tokens: &'a [u32],
    images: Vec<ImagePart>,
}

impl<'a> BlockText<'a> {
    /// The text of block `index`, whose tokens are `tokens`. `images` are those of the whole prompt.
    fn new(index: usize, tokens: &'a [u32], images: &[PromptImage]) -> Self {
        let positions = index * tokens.len()..(index + 1) * tokens.len();
        let part = |image: &PromptImage| {
            let first = image.positions.start.max(positions.start);
            (first < image.positions.end.min(positions.end)).then(|| ImagePart {
                image: image.hash,
                offset: first - positions.start,
                row: first - image.positions.start,
            })
        };
        Self { tokens, images: images.iter().filter_map(part).collect() }
    }

    /// A digest of this text after everything that `before` is the digest of.
    fn digest(&self, before: &Digest) -> Digest {
        let mut hasher = Sha256::new();
        hasher.update(before);
        hasher.update((self.tokens.len() as u64).to_le_bytes());
        self.tokens.iter().for_each(|id| hasher.update(id.to_le_bytes()));
        for ImagePart { image, offset, row } in &self.images {
            hasher.update(image);
            hasher.update((*offset as u64).to_le_bytes());
            hasher.update((*row as u64).to_le_bytes());
        }
        hasher.finalize().into()
    }
}

/// A SHA-256 of everything up to the end of a block. It is the same in every process.
pub(super) type Digest = [u8; 32];

/// The digest of each whole block of `tokens`, after everything that `root` is the digest of.
pub(super) fn digests(
    root: Digest,
    block_size: usize,
    tokens: &[u32],
    images: &[PromptImage],
) -> Vec<Digest> {
    let blocks = tokens.chunks_exact(block_size).enumerate();
    let texts = blocks.map(|(index, tokens)| BlockText::new(index, tokens, images));
    texts
        .scan(root, |last, text| {
            *last = text.digest(last);
            Some(*last)
        })
        .collect()
}

/// A node as it was when this was made. If it was evicted since, no block is found by it.
#[derive(Debug, Clone, Copy)]
pub(super) struct NodeRef {
    id: NodeId,
    chain: u64,
}

/// What the prefix cache has of a text.
pub(super) struct KnownPrefix {
    /// The number of tokens that need not be computed.
    pub tokens: usize,
    /// For each block that has a node, which pools have it.
    pub blocks: Vec<Vec<bool>>,
}

/// A block of a table that must be written: the pool, the index in the sequence, and the block.
#[derive(Debug, Clone, Copy)]
pub(super) struct UnwrittenBlock {
    pub pool: usize,
    pub index: usize,
    pub block: u32,
}

/// `block_size` tokens whose blocks are registered.
#[derive(Debug)]
struct Node {
    parent: Parent,
    /// The hash of the tokens and images together with the parent's chain or the salt.
    chain: u64,
    tokens: Box<[u32]>,
    images: Box<[ImagePart]>,
    /// Number of child nodes.
    children: u32,
    /// The block of each pool. `None` if it was evicted, or released before the node was registered.
    blocks: Box<[Option<u32>]>,
    /// When the last table released the block of each pool.
    used: Box<[u64]>,
    /// The newest turn whose end needs the blocks of pools with a window; 0 if there is none.
    turn: u64,
    /// The highest priority of the sequences that have used the node.
    priority: Priority,
}

/// A pool's blocks are evicted in this order, the lowest key first: priority, turn, time of the last use.
type EvictionKey = (Reverse<Priority>, u64, u64, NodeId);

/// A pool of blocks.
#[derive(Debug)]
struct Pool {
    window: Option<usize>,
    /// For each block, the number of tables that have it.
    holders: Vec<u32>,
    /// For each block, the node that it is registered with.
    node: Vec<Option<NodeId>>,
    free: Vec<u32>,
    /// The number of registered blocks that are in no table.
    cached: usize,
    /// The nodes whose block can be evicted, because no table has it. A pool without a window evicts only nodes without
    /// children.
    order: BTreeSet<EvictionKey>,
}

impl Pool {
    fn new(KvPool { window, blocks }: KvPool) -> Self {
        let ids = 0..u32::try_from(blocks).expect("block ids are u32");
        Self {
            window,
            holders: vec![0; blocks],
            node: vec![None; blocks],
            free: ids.rev().collect(),
            cached: 0,
            order: BTreeSet::new(),
        }
    }

    fn available(&self) -> usize {
        self.free.len() + self.cached
    }

    /// Unregisters a block. It stays in the tables that have it, or becomes free.
    fn unregister(&mut self, block: u32) {
        self.node[block as usize] = None;
        if self.holders[block as usize] == 0 {
            self.cached -= 1;
            self.free.push(block);
        }
    }
}

/// The number of a pool's blocks in each state.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PoolUse {
    pub free: usize,
    /// Blocks that only the prefix cache has. They are evicted if they are needed.
    pub cached: usize,
    pub held: usize,
}

/// A pool has no free block, and no block can be evicted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NoRoom;

#[derive(Debug)]
pub struct BlockManager {
    block_size: usize,
    /// Maximum number of nodes whose blocks in pools with a window the ends of turns may protect from being evicted
    /// first.
    turn_blocks: usize,
    pools: Vec<Pool>,
    nodes: Vec<Node>,
    unused_nodes: Vec<NodeId>,
    by_chain: HashMap<u64, NodeId>,
    /// The keys of the hashes of chains. They are random in each process.
    hasher: RandomState,
    /// The turns whose ends protect blocks, with their nodes; the oldest first.
    turns: VecDeque<(u64, Vec<NodeId>)>,
    next_turn: u64,
    clock: u64,
}

impl BlockManager {
    /// A manager whose blocks are all free. `turn_blocks` is the maximum number of blocks of a pool with a window that
    /// are protected because a turn ended there.
    pub fn new(limits: &KvLimits, turn_blocks: usize) -> Self {
        assert!(limits.block_size > 0, "a KV block holds at least one token");
        assert!(limits.pools[0].window.is_none(), "the first KV pool has no window");
        Self {
            block_size: limits.block_size,
            turn_blocks,
            pools: limits.pools.iter().copied().map(Pool::new).collect(),
            nodes: Vec::new(),
            unused_nodes: Vec::new(),
            by_chain: HashMap::new(),
            hasher: RandomState::new(),
            turns: VecDeque::new(),
            next_turn: 1,
            clock: 0,
        }
    }

    pub fn usage(&self, pool: usize) -> PoolUse {
        let pool = &self.pools[pool];
        let held = pool.holders.len() - pool.available();
        PoolUse { free: pool.free.len(), cached: pool.cached, held }
    }

    /// A table for a sequence that starts with `tokens` and `images`, and the number of tokens that need not be
    /// computed: whole blocks that were computed under the same salt. These are never all of `tokens`, because the
    /// logits of the last token are needed.
    pub fn admit(
        &mut self,
        tokens: &[u32],
        images: &[PromptImage],
        priority: Priority,
        salt: &CacheSalt,
    ) -> (BlockTable, usize) {
        let path = self.longest_path(tokens, images, salt);
        let nodes = path[..self.usable(&path, images)].to_vec();
        let cached = nodes.len() * self.block_size;
        nodes.iter().for_each(|id| self.mark_used(*id, priority));
        let mut blocks = Vec::with_capacity(self.pools.len());
        for pool in 0..self.pools.len() {
            let first = self.first_needed(pool, cached);
            let block = |id: &NodeId| self.nodes[*id as usize].blocks[pool].expect("a usable block");
            let ids: Vec<u32> = nodes[first..].iter().map(block).collect();
            ids.iter().for_each(|block| self.hold(pool, *block));
            blocks.push(BlockList { first, ids });
        }
        (BlockTable { blocks, nodes, priority, salt: salt.clone(), forgotten: false }, cached)
    }

    /// The number of blocks of a pool without a window that [`BlockManager::admit`] would find for `tokens` and that are
    /// already in a table.
    pub fn held_prefix(&self, tokens: &[u32], images: &[PromptImage], salt: &CacheSalt) -> usize {
        let path = self.longest_path(tokens, images, salt);
        path[..self.usable(&path, images)].iter().take_while(|id| self.is_held(0, **id)).count()
    }

    /// The number of blocks of each pool that `table` lacks for positions `..tokens`.
    pub fn missing(&self, table: &BlockTable, tokens: usize) -> impl Iterator<Item = usize> {
        let blocks = tokens.div_ceil(self.block_size);
        table.blocks.iter().map(move |list| blocks.saturating_sub(list.end()))
    }

    /// The number of blocks of each pool that `table` must get before positions `position..tokens` are written: those
    /// that it lacks, and a copy of a shared one.
    pub fn wanted(&self, table: &BlockTable, position: usize, tokens: usize) -> impl Iterator<Item = usize> {
        let both = self.missing(table, tokens).zip(self.shared_at(table, position));
        both.map(|(missing, shared)| missing + usize::from(shared.is_some()))
    }

    /// Whether each pool has this number of blocks that are free or can be evicted.
    pub fn has_room(&self, wanted: impl IntoIterator<Item = usize>) -> bool {
        self.pools.iter().zip(wanted).all(|(pool, wanted)| wanted <= pool.available())
    }

    /// Grows `table` until it has blocks for positions `..tokens`. If a pool has too few blocks, the table does not
    /// change.
    pub fn grow(&mut self, table: &mut BlockTable, tokens: usize) -> Result<(), NoRoom> {
        if !self.has_room(self.missing(table, tokens)) {
            return Err(NoRoom);
        }
        let blocks = tokens.div_ceil(self.block_size);
        for (pool, list) in table.blocks.iter_mut().enumerate() {
            let missing = list.end()..blocks;
            list.ids.extend(missing.map(|_| self.allocate(pool)));
        }
        Ok(())
    }

    /// The block of `position` in each pool, if other tables have it too.
    pub fn shared_at(&self, table: &BlockTable, position: usize) -> impl Iterator<Item = Option<u32>> {
        let index = position / self.block_size;
        let shared = move |(pool, list): (&Pool, &BlockList)| {
            list.get(index).filter(|block| pool.holders[*block as usize] > 1)
        };
        self.pools.iter().zip(&table.blocks).map(shared)
    }

    /// Replaces shared blocks of `position` with the table's own ones, because the blocks are about to be written.
    /// Returns the copies that the device must make first.
    pub fn make_writable(
        &mut self,
        table: &mut BlockTable,
        position: usize,
    ) -> Result<Vec<BlockCopy>, NoRoom> {
        let index = position / self.block_size;
        let shared = (0..).zip(self.shared_at(table, position));
        let shared: Vec<(usize, u32)> = shared.filter_map(|(pool, block)| Some((pool, block?))).collect();
        if shared.iter().any(|(pool, _)| self.pools[*pool].available() == 0) {
            return Err(NoRoom);
        }
        let mut copies = Vec::new();
        for (pool, from) in shared {
            assert!(
                self.pools[pool].node[from as usize].is_none(),
                "a registered block is about to be written"
            );
            let to = self.allocate(pool);
            self.release_block(pool, from);
            let list = &mut table.blocks[pool];
            list.ids[index - list.first] = to;
            copies.push(BlockCopy { pool, from, to });
        }
        Ok(copies)
    }

    /// A second table for the same positions, which shares all blocks.
    pub fn fork(&mut self, table: &BlockTable) -> BlockTable {
        for (pool, list) in table.blocks.iter().enumerate() {
            list.ids.iter().for_each(|block| self.hold(pool, *block));
        }
        BlockTable {
            blocks: table.blocks.clone(),
            nodes: table.nodes.clone(),
            priority: table.priority,
            salt: table.salt.clone(),
            forgotten: table.forgotten,
        }
    }

    /// Registers every block whose positions are all in `tokens`, which are computed. Releases the blocks before the
    /// window of the next position. If another sequence with the same salt registered the same tokens and images first,
    /// the table gets that block instead of its own. Blocks of a dropped text are not registered.
    ///
    /// `tokens` must not end within one of the `images`, unless they end where the table's cached prefix does: a block
    /// with a part of an image is right only if the whole image was computed with it.
    pub fn commit(&mut self, table: &mut BlockTable, tokens: &[u32], images: &[PromptImage]) {
        let size = self.block_size;
        let whole = if table.forgotten { 0 } else { tokens.len() / size };
        for (index, tokens) in tokens.chunks_exact(size).enumerate().take(whole).skip(table.nodes.len()) {
            let parent = table.next_parent();
            let text = BlockText::new(index, tokens, images);
            let chain = self.chain(&parent, &text);
            let id = match self.find(chain, &parent, &text) {
                Ok(Some(id)) if self.may_share(table, index, id) => id,
                // Forks share this block. If it were replaced here, the forks would not have the registered block.
                Ok(Some(_)) => break,
                Ok(None) => self.register(parent, chain, text, table.priority),
                // Two chains have the same hash. The second one is not cached.
                Err(Collision) => break,
            };
            self.mark_used(id, table.priority);
            table.nodes.push(id);
            (0..self.pools.len()).for_each(|pool| self.share(table, pool, index, id));
        }
        self.leave_windows(table, tokens.len());
    }

    /// Releases the blocks that no position from `next` on sees.
    pub fn leave_windows(&mut self, table: &mut BlockTable, next: usize) {
        self.clock += 1;
        for (pool, list) in table.blocks.iter_mut().enumerate() {
            let left = self.first_needed(pool, next).saturating_sub(list.first).min(list.ids.len());
            list.ids.drain(..left).for_each(|block| self.release_block(pool, block));
            list.first += left;
        }
    }

    /// Records that a turn of a conversation ends after the registered tokens of `table`. The next turn starts there,
    /// so the windows before that position are evicted last. Background requests have no next turn.
    pub fn end_turn(&mut self, table: &BlockTable) {
        if table.priority == Priority::Background {
            return;
        }
        let end = table.nodes.len() * self.block_size;
        let with_window: Vec<usize> =
            (0..self.pools.len()).filter(|pool| self.pools[*pool].window.is_some()).collect();
        let first = with_window.iter().map(|pool| self.first_needed(*pool, end)).min();
        let window = first.and_then(|first| table.nodes.get(first..)).unwrap_or_default();
        if window.is_empty() {
            return;
        }
        let turn = self.next_turn;
        self.next_turn += 1;
        let is_cached =
            |id: &NodeId| with_window.iter().any(|pool| self.nodes[*id as usize].blocks[*pool].is_some());
        let nodes: Vec<NodeId> = window.iter().copied().filter(is_cached).collect();
        for id in &nodes {
            self.set_turn(*id, turn);
        }
        self.turns.push_back((turn, nodes));
        self.limit_turns();
    }

    /// Releases every block of `table`. Registered blocks stay cached.
    pub fn release(&mut self, table: BlockTable) {
        self.clock += 1;
        for (pool, list) in table.blocks.into_iter().enumerate() {
            list.ids.into_iter().rev().for_each(|block| self.release_block(pool, block));
        }
    }

    /// Releases the table of a sequence whose logits are not finite. Drops its text and all texts that begin with its
    /// first block from the cache, so that sequences that start with the same tokens compute them again. `others` are
    /// the tables of all other sequences. Tables that share the first block keep their blocks, but no other sequence
    /// finds these blocks, nor blocks that these sequences add. If the shared blocks are wrong, these sequences fail
    /// too.
    pub fn forget<'a>(&mut self, table: BlockTable, others: impl Iterator<Item = &'a mut BlockTable>) {
        if let Some(first) = table.first_block() {
            for other in others.filter(|other| other.first_block() == Some(first)) {
                other.nodes.clear();
                other.forgotten = true;
            }
            // There is no node if the block was not complete yet, or if another sequence's block was registered
            // instead.
            if let Some(root) = self.pools[0].node[first as usize] {
                self.unregister_tree(root);
            }
        }
        self.release(table);
    }

    // --- texts that are kept outside the device ---

    /// The nodes of a table's registered blocks, from the first block on.
    pub(super) fn nodes(&self, table: &BlockTable) -> Vec<NodeRef> {
        table.nodes.iter().map(|&id| NodeRef { id, chain: self.nodes[id as usize].chain }).collect()
    }

    /// The block of a pool that is registered with a node, if it was not evicted.
    pub(super) fn registered(&self, NodeRef { id, chain }: NodeRef, pool: usize) -> Option<u32> {
        let is_there = self.by_chain.get(&chain) == Some(&id);
        is_there.then(|| self.nodes[id as usize].blocks[pool]).flatten()
    }

    /// What the cache has of a text.
    pub(super) fn known_prefix(
        &self,
        tokens: &[u32],
        images: &[PromptImage],
        salt: &CacheSalt,
    ) -> KnownPrefix {
        let path = self.longest_path(tokens, images, salt);
        let has = |id: &NodeId| self.nodes[*id as usize].blocks.iter().map(Option::is_some).collect();
        KnownPrefix {
            tokens: self.usable(&path, images) * self.block_size,
            blocks: path.iter().map(has).collect(),
        }
    }

    /// A table with the blocks that a sequence needs after the first `blocks` blocks of `tokens`, and those of them that the
    /// cache does not have. Once they are written, [`BlockManager::commit`] adds them to the cache.
    pub(super) fn admit_unwritten(
        &mut self,
        tokens: &[u32],
        images: &[PromptImage],
        (priority, salt): (Priority, &CacheSalt),
        blocks: usize,
    ) -> Result<(BlockTable, Vec<UnwrittenBlock>), NoRoom> {
        let mut nodes = self.longest_path(tokens, images, salt);
        nodes.truncate(blocks);
        let known = |this: &Self, pool: usize, index: usize| {
            nodes.get(index).and_then(|id| this.nodes[*id as usize].blocks[pool])
        };
        let firsts: Vec<usize> =
            (0..self.pools.len()).map(|pool| self.first_needed(pool, blocks * self.block_size)).collect();
        let mut lists = Vec::new();
        for (pool, &first) in firsts.iter().enumerate() {
            let list: Vec<Option<u32>> = (first..blocks).map(|index| known(self, pool, index)).collect();
            list.iter().flatten().for_each(|block| self.hold(pool, *block));
            lists.push(list);
        }
        let missing = lists.iter().map(|list| list.iter().filter(|block| block.is_none()).count());
        if !self.has_room(missing.collect::<Vec<_>>()) {
            for (pool, list) in lists.iter().enumerate() {
                list.iter().flatten().for_each(|block| self.release_block(pool, *block));
            }
            return Err(NoRoom);
        }
        nodes.iter().for_each(|id| self.mark_used(*id, priority));
        let mut unwritten = Vec::new();
        // The table has no nodes yet, because nodes that exist may lack a block of a pool with a window.
        let mut table = BlockTable { priority, salt: salt.clone(), ..BlockTable::default() };
        for (pool, (list, first)) in lists.into_iter().zip(firsts).enumerate() {
            let ids = (first..).zip(list).map(|(index, block)| {
                block.unwrap_or_else(|| {
                    let block = self.allocate(pool);
                    unwritten.push(UnwrittenBlock { pool, index, block });
                    block
                })
            });
            table.blocks.push(BlockList { first, ids: ids.collect() });
        }
        Ok((table, unwritten))
    }

    // --- the prefix cache ---

    /// The cached nodes of `tokens` and `images` under a salt, from the first block on. The block of the last token is
    /// never included.
    fn longest_path(&self, tokens: &[u32], images: &[PromptImage], salt: &CacheSalt) -> Vec<NodeId> {
        let mut path: Vec<NodeId> = Vec::new();
        let mut parent = Parent::Root(salt.clone());
        let known = &tokens[..tokens.len().saturating_sub(1)];
        for (index, tokens) in known.chunks_exact(self.block_size).enumerate() {
            let text = BlockText::new(index, tokens, images);
            let Ok(Some(id)) = self.find(self.chain(&parent, &text), &parent, &text) else { break };
            path.push(id);
            parent = Parent::Node(id);
        }
        path
    }

    /// The number of blocks of `path` that a sequence can skip: the largest number for which the window before the next
    /// position is complete in every pool. If that position is within an image, the window must begin before the image,
    /// because the rest of the image sees all of it.
    fn usable(&self, path: &[NodeId], images: &[PromptImage]) -> usize {
        // For each pool, the number of successive blocks up to the current one.
        let mut rows = vec![0; self.pools.len()];
        let mut usable = 0;
        for (blocks, id) in (1..).zip(path) {
            for (row, block) in rows.iter_mut().zip(&self.nodes[*id as usize].blocks) {
                *row = if block.is_some() { *row + 1 } else { 0 };
            }
            let next = blocks * self.block_size;
            let image = images.iter().find(|image| image.positions.contains(&next));
            let sees_image = |pool: usize| {
                image.is_none_or(|image| first_seen(self.pools[pool].window, next) <= image.positions.start)
            };
            let is_complete = |pool: usize, row: usize| row >= blocks - self.first_needed(pool, next);
            if (0..).zip(&rows).all(|(pool, row)| is_complete(pool, *row) && sees_image(pool)) {
                usable = blocks;
            }
        }
        usable
    }

    /// The first block that a pool's layers need at `position`.
    fn first_needed(&self, pool: usize, position: usize) -> usize {
        first_seen(self.pools[pool].window, position) / self.block_size
    }

    fn chain(&self, parent: &Parent, text: &BlockText<'_>) -> u64 {
        match parent {
            Parent::Root(salt) => self.hasher.hash_one((salt, text)),
            Parent::Node(id) => self.hasher.hash_one((self.nodes[*id as usize].chain, text)),
        }
    }

    /// The node with the parent `parent` and this text, whose chain is `chain`. Different texts may have the same hash,
    /// so the parent, the tokens and the images are compared too. The parent represents all earlier tokens and images,
    /// and the salt: they were compared when the parent was looked up.
    fn find(&self, chain: u64, parent: &Parent, text: &BlockText<'_>) -> Result<Option<NodeId>, Collision> {
        let Some(&id) = self.by_chain.get(&chain) else { return Ok(None) };
        let node = &self.nodes[id as usize];
        let is_same = node.parent == *parent && *node.tokens == *text.tokens && *node.images == *text.images;
        if is_same { Ok(Some(id)) } else { Err(Collision) }
    }

    /// Adds a node, without blocks.
    fn register(&mut self, parent: Parent, chain: u64, text: BlockText<'_>, priority: Priority) -> NodeId {
        if let Some(parent) = parent.node() {
            self.nodes[parent as usize].children += 1;
        }
        let node = Node {
            parent,
            chain,
            tokens: text.tokens.into(),
            images: text.images.into(),
            children: 0,
            blocks: vec![None; self.pools.len()].into(),
            used: vec![self.clock; self.pools.len()].into(),
            turn: 0,
            priority,
        };
        let id = match self.unused_nodes.pop() {
            Some(id) => {
                self.nodes[id as usize] = node;
                id
            }
            None => {
                self.nodes.push(node);
                (self.nodes.len() - 1) as NodeId
            }
        };
        self.by_chain.insert(chain, id);
        id
    }

    /// Removes a root node and all its descendants from the cache.
    fn unregister_tree(&mut self, root: NodeId) {
        let mut children: HashMap<NodeId, Vec<NodeId>> = HashMap::new();
        for &id in self.by_chain.values() {
            if let Some(parent) = self.nodes[id as usize].parent.node() {
                children.entry(parent).or_default().push(id);
            }
        }
        let mut tree = vec![root];
        while let Some(id) = tree.pop() {
            tree.extend(children.remove(&id).into_iter().flatten());
            self.unregister(id);
        }
    }

    /// Removes a node from the cache. Its blocks stay in the tables that have them, or become free.
    fn unregister(&mut self, id: NodeId) {
        for pool in 0..self.pools.len() {
            self.unregister_block(pool, id);
        }
        let node = &mut self.nodes[id as usize];
        self.by_chain.remove(&node.chain);
        node.turn = 0;
        self.unused_nodes.push(id);
    }

    /// Removes a node's block of one pool from the cache.
    fn unregister_block(&mut self, pool: usize, id: NodeId) {
        let key = self.key(pool, id);
        if let Some(block) = self.nodes[id as usize].blocks[pool].take() {
            self.pools[pool].order.remove(&key);
            self.pools[pool].unregister(block);
        }
    }

    /// Whether the table's own blocks may be replaced by those of `id`: not if other tables have them too.
    fn may_share(&self, table: &BlockTable, index: usize, id: NodeId) -> bool {
        let own = table.blocks[0].ids[index];
        self.nodes[id as usize].blocks[0] == Some(own) || self.pools[0].holders[own as usize] == 1
    }

    /// Registers the table's block of a pool with `id`, or replaces it by the block that is already registered there.
    fn share(&mut self, table: &mut BlockTable, pool: usize, index: usize, id: NodeId) {
        let list = &mut table.blocks[pool];
        let Some(own) = list.get(index) else { return };
        match self.nodes[id as usize].blocks[pool] {
            Some(shared) if shared == own => {}
            Some(shared) => {
                self.hold(pool, shared);
                self.release_block(pool, own);
                list.ids[index - list.first] = shared;
            }
            None => {
                self.nodes[id as usize].blocks[pool] = Some(own);
                self.pools[pool].node[own as usize] = Some(id);
            }
        }
    }

    fn set_turn(&mut self, id: NodeId, turn: u64) {
        self.change(id, |node| node.turn = turn);
    }

    /// Records that a sequence with this priority uses the node.
    fn mark_used(&mut self, id: NodeId, priority: Priority) {
        self.change(id, |node| node.priority = node.priority.min(priority));
    }

    /// Changes fields of a node that are part of its eviction keys.
    fn change(&mut self, id: NodeId, change: impl FnOnce(&mut Node)) {
        for pool in 0..self.pools.len() {
            let key = self.key(pool, id);
            self.pools[pool].order.remove(&key);
        }
        change(&mut self.nodes[id as usize]);
        (0..self.pools.len()).for_each(|pool| self.list(pool, id));
    }

    fn key(&self, pool: usize, id: NodeId) -> EvictionKey {
        let node = &self.nodes[id as usize];
        let turn = self.pools[pool].window.map_or(0, |_| node.turn);
        (Reverse(node.priority), turn, node.used[pool], id)
    }

    /// Whether a table has a node's block of a pool.
    fn is_held(&self, pool: usize, id: NodeId) -> bool {
        let block = self.nodes[id as usize].blocks[pool];
        block.is_some_and(|block| self.pools[pool].holders[block as usize] > 0)
    }

    fn can_be_evicted(&self, pool: usize, id: NodeId) -> bool {
        let node = &self.nodes[id as usize];
        let is_leaf = self.pools[pool].window.is_some() || node.children == 0;
        is_leaf && node.blocks[pool].is_some() && !self.is_held(pool, id)
    }

    /// Lists a node's block of a pool for eviction, if it can be evicted.
    fn list(&mut self, pool: usize, id: NodeId) {
        if self.can_be_evicted(pool, id) {
            let key = self.key(pool, id);
            self.pools[pool].order.insert(key);
        }
    }

    /// Ends the protection by the oldest turns until at most `turn_blocks` blocks are protected.
    fn limit_turns(&mut self) {
        // Skips blocks that were evicted, and blocks that belong to a newer turn by now.
        let nodes = &self.nodes;
        self.turns.retain_mut(|(turn, ids)| {
            ids.retain(|id| nodes[*id as usize].turn == *turn);
            !ids.is_empty()
        });
        let mut total: usize = self.turns.iter().map(|(_, ids)| ids.len()).sum();
        while total > self.turn_blocks {
            let (_, ids) = self.turns.pop_front().expect("turns protect all these blocks");
            total -= ids.len();
            ids.into_iter().for_each(|id| self.set_turn(id, 0));
        }
    }

    // --- blocks ---

    /// Allocates a block for one table. The caller must check that there is room.
    fn allocate(&mut self, pool: usize) -> u32 {
        if self.pools[pool].free.is_empty() {
            self.evict(pool);
        }
        let pool = &mut self.pools[pool];
        let block = pool.free.pop().expect("the caller has checked that there is room");
        pool.holders[block as usize] = 1;
        block
    }

    /// Counts one more table that has the block.
    fn hold(&mut self, pool: usize, block: u32) {
        let which = &mut self.pools[pool];
        let holders = &mut which.holders[block as usize];
        *holders += 1;
        if *holders > 1 {
            return;
        }
        let id = which.node[block as usize].expect("a block without holders is cached");
        which.cached -= 1;
        let key = self.key(pool, id);
        self.pools[pool].order.remove(&key);
    }

    /// Counts one table less that has the block. Without tables, the block becomes cached or free.
    fn release_block(&mut self, pool: usize, block: u32) {
        let which = &mut self.pools[pool];
        let holders = &mut which.holders[block as usize];
        *holders -= 1;
        if *holders > 0 {
            return;
        }
        let Some(id) = which.node[block as usize] else {
            which.free.push(block);
            return;
        };
        which.cached += 1;
        self.nodes[id as usize].used[pool] = self.clock;
        self.list(pool, id);
    }

    /// Evicts the block of a pool with the lowest key. If the pool has no window, its node is removed too.
    fn evict(&mut self, pool: usize) {
        let (.., id) = *self.pools[pool].order.first().expect("the caller has checked that there is room");
        if self.pools[pool].window.is_some() {
            self.unregister_block(pool, id);
            self.set_turn(id, 0);
            return;
        }
        self.unregister(id);
        if let Some(parent) = self.nodes[id as usize].parent.node() {
            self.nodes[parent as usize].children -= 1;
            (0..self.pools.len()).for_each(|pool| self.list(pool, parent));
        }
    }

    /// Panics if an invariant is broken. `tables` are all tables.
    pub fn check<'a>(&self, tables: impl Iterator<Item = &'a BlockTable>) {
        let mut held: Vec<Vec<u32>> = self.pools.iter().map(|pool| vec![0; pool.holders.len()]).collect();
        let mut salts = HashMap::new();
        for table in tables {
            assert_eq!(table.blocks.len(), self.pools.len(), "pools of a table");
            for (pool, list) in table.blocks.iter().enumerate() {
                for block in &list.ids {
                    held[pool][*block as usize] += 1;
                    let salt = *salts.entry((pool, block)).or_insert(&table.salt);
                    assert_eq!(*salt, table.salt, "block {block} of pool {pool} is shared by two salts");
                }
                let has_window = self.pools[pool].window.is_some();
                assert!(
                    has_window || list.first == 0,
                    "pool {pool} has no window, and the table lacks a block"
                );
                assert!(table.nodes.len() <= list.end(), "more blocks are registered than the table has");
            }
            assert!(table.nodes.is_empty() || !table.forgotten, "blocks of a dropped text are registered");
            for (index, id) in table.nodes.iter().enumerate() {
                let node = &self.nodes[*id as usize];
                let before = index.checked_sub(1).map(|i| Parent::Node(table.nodes[i]));
                let expected = before.unwrap_or_else(|| Parent::Root(table.salt.clone()));
                assert_eq!(node.parent, expected, "the parent of block {index}");
                for (pool, list) in table.blocks.iter().enumerate() {
                    if let Some(own) = list.get(index) {
                        let registered = node.blocks[pool];
                        assert_eq!(
                            registered,
                            Some(own),
                            "block {index} of pool {pool} is not the registered one"
                        );
                    }
                }
            }
        }
        for (pool, held) in self.pools.iter().zip(&held) {
            assert_eq!(&pool.holders, held, "holders");
            let mut free = vec![false; held.len()];
            for block in &pool.free {
                assert!(!std::mem::replace(&mut free[*block as usize], true), "block {block} is free twice");
            }
            let mut cached = 0;
            for block in 0..held.len() {
                let registered = pool.node[block].is_some();
                match (free[block], held[block] > 0) {
                    (true, held) => assert!(!held && !registered, "block {block} is free, and in use"),
                    (false, true) => {}
                    (false, false) => {
                        assert!(registered, "block {block} is neither free, registered nor in a table");
                        cached += 1;
                    }
                }
            }
            assert_eq!(pool.cached, cached, "cached blocks");
        }
        self.check_nodes();
    }

    fn check_nodes(&self) {
        let mut children = vec![0; self.nodes.len()];
        let mut evictable = vec![0; self.pools.len()];
        for (chain, &id) in &self.by_chain {
            let node = &self.nodes[id as usize];
            assert_eq!(node.chain, *chain);
            if let Some(parent) = node.parent.node() {
                children[parent as usize] += 1;
                let before = &self.nodes[parent as usize];
                assert!(before.priority <= node.priority, "the parent of a node is evicted before the node");
                assert!(
                    !self.is_held(0, id) || self.is_held(0, parent),
                    "a block is held, but its parent is not"
                );
            }
            for (i, pool) in self.pools.iter().enumerate() {
                match node.blocks[i] {
                    Some(block) => {
                        assert_eq!(pool.node[block as usize], Some(id), "a node's block of pool {i}")
                    }
                    None => assert!(pool.window.is_some(), "a node without a block of pool {i}"),
                }
                if pool.window.is_none() {
                    assert_eq!(self.is_held(i, id), self.is_held(0, id), "holders in pools without a window");
                }
                if self.can_be_evicted(i, id) {
                    evictable[i] += 1;
                    let is_listed = pool.order.contains(&self.key(i, id));
                    assert!(is_listed, "a block of pool {i} that can be evicted is not listed");
                }
            }
        }
        let listed: Vec<usize> = self.pools.iter().map(|pool| pool.order.len()).collect();
        assert_eq!(evictable, listed, "the numbers of blocks that can be evicted");
        assert_eq!(self.by_chain.len() + self.unused_nodes.len(), self.nodes.len(), "nodes");
        for &id in self.by_chain.values() {
            assert_eq!(self.nodes[id as usize].children, children[id as usize], "children of node {id}");
        }
    }
}

/// The error that a different chain with the same hash is registered.
struct Collision;

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use rand::{Rng, SeedableRng};
    use rand_chacha::ChaCha8Rng;

    use super::*;

    const SIZE: usize = 2;

    /// Pools with these windows.
    fn limits(windows: &[Option<usize>]) -> KvLimits {
        let pool = |window: &Option<usize>| KvPool { window: *window, blocks: window.map_or(24, |_| 16) };
        KvLimits { block_size: SIZE, pools: windows.iter().map(pool).collect() }
    }

    fn salt(n: usize) -> CacheSalt {
        CacheSalt::new(["", "a", "b"][n].as_bytes())
    }

    #[test]
    fn texts_with_the_same_hash_under_different_salts_share_no_blocks() {
        let mut blocks = BlockManager::new(&limits(&[None, Some(4)]), 0);
        let text = [1, 2, 3, 4, 5];
        let compute = |blocks: &mut BlockManager, salt: &CacheSalt| {
            let (mut table, cached) = blocks.admit(&text, &[], Priority::Interactive, salt);
            blocks.grow(&mut table, text.len()).unwrap();
            blocks.commit(&mut table, &text, &[]);
            blocks.release(table);
            cached
        };
        let [one, other] = [salt(1), salt(2)];
        assert_eq!([compute(&mut blocks, &one), compute(&mut blocks, &one)], [0, 4]);
        let begin = BlockText::new(0, &text[..SIZE], &[]);
        let [first, forged] = [&one, &other].map(|salt| blocks.chain(&Parent::Root(salt.clone()), &begin));
        blocks.by_chain.insert(forged, blocks.by_chain[&first]);
        assert_eq!([compute(&mut blocks, &other), compute(&mut blocks, &other)], [0, 0]);
        assert_eq!(compute(&mut blocks, &one), 4);
    }

    /// An image of three tokens.
    fn image(start: usize, n: u8) -> PromptImage {
        PromptImage { positions: start..start + 3, hash: [n; 32], size: [0; 2], pixels: [].into() }
    }

    #[test]
    fn texts_with_different_images_share_no_blocks_even_if_their_chains_are_the_same() {
        let mut blocks = BlockManager::new(&limits(&[None, Some(4)]), 0);
        let text = [0; 9];
        let compute = |blocks: &mut BlockManager, images: &[PromptImage]| {
            let (mut table, cached) = blocks.admit(&text, images, Priority::Interactive, &salt(0));
            blocks.grow(&mut table, text.len()).unwrap();
            blocks.commit(&mut table, &text, images);
            blocks.release(table);
            cached
        };
        let [one, other] = [1, 2].map(|n| vec![image(3, n)]);
        assert_eq!([compute(&mut blocks, &one), compute(&mut blocks, &one)], [0, 8]);
        assert_eq!([compute(&mut blocks, &other), compute(&mut blocks, &other)], [2, 8]);
        assert_eq!(compute(&mut blocks, &[image(2, 1)]), 2, "the same image one position before");
        assert_eq!(compute(&mut blocks, &[image(3, 1), image(6, 2)]), 6, "the same image, and another one");
        assert_eq!(compute(&mut blocks, &[]), 2, "no image");

        let third = vec![image(3, 3)];
        let begin = Parent::Node(blocks.longest_path(&text, &one, &salt(0))[0]);
        let [first, forged] = [&one, &third]
            .map(|images| blocks.chain(&begin, &BlockText::new(1, &text[SIZE..2 * SIZE], images)));
        blocks.by_chain.insert(forged, blocks.by_chain[&first]);
        assert_eq!([compute(&mut blocks, &third), compute(&mut blocks, &third)], [2, 2]);
    }

    /// The window of three at position 6 has the image's beginning, the window of two has not.
    #[test]
    fn a_prefix_ends_within_an_image_only_if_the_windows_have_its_beginning() {
        for (window, expected) in [(3, 6), (2, 4)] {
            let mut blocks = BlockManager::new(&limits(&[None, Some(window)]), 0);
            let images = [image(4, 1)];
            let (mut table, _) = blocks.admit(&[0; 7], &images, Priority::Interactive, &salt(0));
            blocks.grow(&mut table, 7).unwrap();
            blocks.commit(&mut table, &[0; 7], &images);
            let cached = blocks.admit(&[0; 7], &images, Priority::Interactive, &salt(0)).1;
            assert_eq!(cached, expected, "window of {window}");
        }
    }

    /// A text that a sequence computes.
    struct Text {
        tokens: Vec<u32>,
        images: Vec<PromptImage>,
        computed: usize,
        salt: usize,
        table: BlockTable,
    }

    impl Text {
        /// The tokens, with different ones in the place of each image.
        fn seen(&self) -> Vec<u32> {
            let mut seen = self.tokens.clone();
            for PromptImage { positions, hash, .. } in &self.images {
                for (row, position) in positions.clone().enumerate() {
                    seen[position] = 10 * (1 + u32::from(hash[0])) + row as u32;
                }
            }
            seen
        }

        /// The image that has tokens before `position` and tokens after it.
        fn split_at(&self, position: usize) -> Option<&PromptImage> {
            self.images.iter().find(|image| image.is_split_at(position))
        }
    }

    /// The contents of a block: the text up to its end, its salt, and a number that is different each time that the
    /// first block of the text is computed.
    #[derive(Debug, Clone)]
    struct Content {
        text: Vec<u32>,
        salt: usize,
        beginning: usize,
    }

    /// The contents of all blocks, by pool and block.
    struct Contents {
        pools: Vec<HashMap<u32, Content>>,
        beginnings: usize,
    }

    impl Contents {
        fn copy(&mut self, BlockCopy { pool, from, to }: BlockCopy, begins: bool) {
            self.beginnings += 1;
            let blocks = &mut self.pools[pool];
            let mut content = blocks[&from].clone();
            if begins {
                content.beginning = self.beginnings;
            }
            blocks.insert(to, content);
        }

        fn beginning(&self, table: &BlockTable) -> usize {
            self.pools[0][&table.blocks[0].ids[0]].beginning
        }

        /// Computes the tokens of a text up to `end`.
        fn write(&mut self, text: &Text, end: usize) {
            self.beginnings += 1;
            let beginning = if text.computed == 0 { self.beginnings } else { self.beginning(&text.table) };
            let seen = text.seen();
            for index in text.computed / SIZE..end.div_ceil(SIZE) {
                let tokens = seen[..end.min((index + 1) * SIZE)].to_vec();
                let content = Content { text: tokens, salt: text.salt, beginning };
                for (pool, list) in self.pools.iter_mut().zip(&text.table.blocks) {
                    pool.insert(list.get(index).expect("a block to write to"), content.clone());
                }
            }
        }

        /// Panics unless the blocks of a text have the contents of that text under the same salt.
        fn check(&self, text: &Text) {
            let seen = text.seen();
            for index in 0..text.computed.div_ceil(SIZE) {
                let expected = (text.salt, &seen[..text.computed.min((index + 1) * SIZE)]);
                for (pool, list) in self.pools.iter().zip(&text.table.blocks) {
                    let Some(block) = list.get(index) else { continue };
                    assert_eq!((pool[&block].salt, &pool[&block].text[..]), expected, "block {index}");
                }
            }
        }
    }

    /// There are few tokens and few blocks, so that texts have common beginnings, and lose blocks.
    #[test]
    fn a_cache_hit_has_the_text_and_the_salt_of_its_sequence_and_is_never_dropped() {
        let seed = 0xb10c;
        println!("seed {seed}");
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let (mut hits, mut forks, mut dropped, mut split) = (0, 0, 0, 0);
        let kinds: [&[Option<usize>]; 5] = [
            &[None],
            &[None, Some(4)],
            // Layers with heads of another size have a pool of their own, also if their window is the same.
            &[None, None],
            &[None, Some(4), None],
            &[None, Some(3), Some(8)],
        ];
        for windows in kinds.into_iter().cycle().take(60) {
            let mut blocks = BlockManager::new(&limits(windows), rng.random_range(0..8));
            let pools = vec![HashMap::new(); windows.len()];
            let (mut contents, mut texts) = (Contents { pools, beginnings: 0 }, Vec::<Text>::new());
            let mut forgotten = HashSet::new();
            for _ in 0..1500 {
                let chosen = (!texts.is_empty()).then(|| rng.random_range(0..texts.len()));
                match (rng.random_range(0..10), chosen) {
                    (0..3, _) if texts.len() < 6 => {
                        let len = rng.random_range(1..16);
                        let tokens: Vec<u32> = (0..len).map(|_| rng.random_range(0..2)).collect();
                        let images: Vec<PromptImage> = match len {
                            ..3 => Vec::new(),
                            _ if rng.random() => Vec::new(),
                            // Few positions, so that the texts before the images are often equal.
                            _ => vec![image(rng.random_range(0..=(len - 3).min(2)), rng.random_range(0..2))],
                        };
                        let salt_n = rng.random_range(0..3);
                        let priority =
                            if rng.random() { Priority::Interactive } else { Priority::Background };
                        let held = blocks.held_prefix(&tokens, &images, &salt(salt_n));
                        let (table, computed) = blocks.admit(&tokens, &images, priority, &salt(salt_n));
                        assert!(held * SIZE <= computed && computed < len);
                        if computed > 0 {
                            hits += 1;
                            assert!(!forgotten.contains(&contents.beginning(&table)), "the text was dropped");
                        }
                        let text = Text { tokens, images, computed, salt: salt_n, table };
                        if let Some(image) = text.split_at(computed) {
                            split += 1;
                            let has_image = |list: &BlockList| list.first * SIZE <= image.positions.start;
                            assert!(text.table.blocks.iter().all(has_image), "the image's beginning");
                        }
                        texts.push(text);
                    }
                    (3, Some(i))
                        if texts[i].computed > 0
                            && texts[i].split_at(texts[i].computed).is_none()
                            && texts.len() < 6 =>
                    {
                        let Text { ref tokens, ref images, computed, salt, ref table } = texts[i];
                        let (tokens, table) = (tokens[..computed].to_vec(), blocks.fork(table));
                        let images = images.iter().filter(|image| image.positions.end <= computed);
                        let images = images.cloned().collect();
                        texts.push(Text { tokens, images, computed, salt, table });
                        forks += 1;
                    }
                    (4, Some(i)) => {
                        let Text { table, .. } = texts.swap_remove(i);
                        blocks.end_turn(&table);
                        blocks.release(table);
                    }
                    (5, Some(i)) if texts[i].computed > 0 && rng.random_bool(0.3) => {
                        let Text { table, .. } = texts.swap_remove(i);
                        let cached = blocks.usage(0).cached;
                        forgotten.insert(contents.beginning(&table));
                        blocks.forget(table, texts.iter_mut().map(|text| &mut text.table));
                        dropped += usize::from(blocks.usage(0).cached < cached);
                    }
                    (_, Some(i)) => {
                        let text = &mut texts[i];
                        if text.computed == text.tokens.len() {
                            text.tokens.push(rng.random_range(0..2));
                        }
                        let end = rng.random_range(text.computed + 1..=text.tokens.len());
                        let end = text.split_at(end).map_or(end, |image| image.positions.end);
                        if !blocks.has_room(blocks.wanted(&text.table, text.computed, end)) {
                            blocks.release(texts.swap_remove(i).table);
                            continue;
                        }
                        blocks.grow(&mut text.table, end).unwrap();
                        for copy in blocks.make_writable(&mut text.table, text.computed).unwrap() {
                            contents.copy(copy, text.computed < SIZE);
                        }
                        contents.write(text, end);
                        text.computed = end;
                        blocks.commit(&mut text.table, &text.tokens[..end], &text.images);
                    }
                    _ => {}
                }
                blocks.check(texts.iter().map(|text| &text.table));
                texts.iter().for_each(|text| contents.check(text));
            }
        }
        println!(
            "{hits} hits, {split} within an image, {forks} forks, {dropped} dropped texts that others would have found"
        );
        assert!(hits > 500 && forks > 500 && dropped > 100 && split > 50, "too few cases");
    }
}
