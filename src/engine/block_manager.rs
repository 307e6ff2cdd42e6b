//! The pools of KV blocks, the sequences' block tables, and the prefix cache.
//!
//! There are two pools, because models have two kinds of layers: a full layer needs every token of a sequence, a
//! sliding layer only those of a window. The [`BlockTable`] of a sequence has a block of each pool for every
//! `block_size` positions. Sliding blocks before the window are released while the sequence runs.
//!
//! ```text
//! positions   0   16   32   48   64   80        window of 32, at position 80
//! full        f0 | f1 | f2 | f3 | f4 |
//! sliding      -    -  | s2 | s3 | s4 |
//! ```
//!
//! A block whose tokens are all computed is *registered*: it becomes part of a [`Node`] of the prefix cache. A node is
//! found by its salt, its tokens, and all tokens before them. Registered blocks are never written again. All sequences
//! of that salt that start with the same tokens share them. They stay in the cache after the last such sequence ends,
//! until their room is needed. No sequence can find out what other salts have, nor whether a text is cached there.
//!
//! A cache hit at position `p` needs all full blocks before `p`, and all sliding blocks of the window before `p`.
//! Missing sliding blocks cannot be computed from the window alone, because each sliding layer depends on earlier
//! layers, whose windows reach further back.
//!
//! If the logits of a text are not finite, any of its blocks may be wrong. So the cache drops the text from its first
//! block on, with all texts that begin with that block ([`BlockManager::forget`]).
//!
//! The order of eviction: blocks that only background sequences have used are evicted first. So background sequences
//! take room from each other before they take it from interactive ones. In each of the two groups, the least recently
//! used full block without child blocks is evicted first. Of the sliding blocks, those in which no turn of a
//! conversation ended are evicted first, and then those of the oldest turn.
//!
//! Invariants, checked by [`BlockManager::check`]:
//!
//! - A block is free, cached (registered, but in no table) or held (in a table). Its count of holders is the number of
//!   tables that have it.
//! - A table that has a full block has all full blocks before it.
//! - A sliding block is registered only together with its full block.
//! - Tables that share a block have the same salt.
//! - All blocks before a block that an interactive sequence has used were also used by an interactive sequence.

use std::cmp::Reverse;
use std::collections::hash_map::RandomState;
use std::collections::{BTreeSet, HashMap, VecDeque};
use std::hash::BuildHasher;

use super::request::{CacheSalt, Priority};
use crate::model::{BlockCopy, BlockPool, KvLimits};

/// The blocks of one sequence. [`BlockManager::admit`] creates a table, and [`BlockManager::release`] frees its blocks.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct BlockTable {
    /// Block `i` has the positions from `i * block_size` on.
    full: Vec<u32>,
    /// The blocks of the sliding layers, from block index `sliding_first` on.
    sliding: VecDeque<u32>,
    sliding_first: usize,
    /// The nodes of the registered blocks of `full`, from the first block on.
    nodes: Vec<NodeId>,
    /// The priority and the salt of the sequence.
    priority: Priority,
    salt: CacheSalt,
    /// Whether the cache dropped the text. Its blocks are not registered from then on.
    forgotten: bool,
}

impl BlockTable {
    /// The blocks of the full layers, from position 0 on.
    pub fn full(&self) -> &[u32] {
        &self.full
    }

    /// The block index of the first sliding block, and the sliding blocks.
    pub fn sliding(&self) -> (usize, impl Iterator<Item = u32> + '_) {
        (self.sliding_first, self.sliding.iter().copied())
    }

    pub(super) fn salt(&self) -> &CacheSalt {
        &self.salt
    }

    /// The parent of the next block to be registered.
    fn next_parent(&self) -> Parent {
        self.nodes.last().map_or_else(|| Parent::Root(self.salt.clone()), |id| Parent::Node(*id))
    }

    /// The number of blocks of a pool, including released sliding blocks.
    fn num_blocks(&self, pool: BlockPool) -> usize {
        match pool {
            BlockPool::Full => self.full.len(),
            BlockPool::Sliding => self.sliding_first + self.sliding.len(),
        }
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

/// A registered block of `block_size` tokens.
#[derive(Debug)]
struct Node {
    parent: Parent,
    /// The hash of the tokens together with the parent's chain or the salt.
    chain: u64,
    tokens: Box<[u32]>,
    /// Number of child nodes.
    children: u32,
    full: u32,
    sliding: Option<u32>,
    /// When the last table released the full block, and the sliding block.
    used: [u64; 2],
    /// The newest turn whose end needs the sliding block; 0 if there is none.
    turn: u64,
    /// The highest priority of the sequences that have used the node.
    priority: Priority,
}

/// Full blocks are evicted in this order, the lowest key first.
type FullKey = (Reverse<Priority>, u64, NodeId);
/// Sliding blocks are evicted in this order, the lowest key first.
type SlidingKey = (Reverse<Priority>, u64, u64, NodeId);

impl Node {
    fn full_key(&self, id: NodeId) -> FullKey {
        (Reverse(self.priority), self.used[0], id)
    }

    fn sliding_key(&self, id: NodeId) -> SlidingKey {
        (Reverse(self.priority), self.turn, self.used[1], id)
    }
}

/// One of the two pools.
#[derive(Debug)]
struct Pool {
    /// For each block, the number of tables that have it.
    holders: Vec<u32>,
    /// For each block, the node that it is registered with.
    node: Vec<Option<NodeId>>,
    free: Vec<u32>,
    /// The number of registered blocks that are in no table.
    cached: usize,
}

impl Pool {
    fn new(blocks: usize) -> Self {
        let ids = 0..u32::try_from(blocks).expect("block ids are u32");
        Self { holders: vec![0; blocks], node: vec![None; blocks], free: ids.rev().collect(), cached: 0 }
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
    limits: KvLimits,
    /// Maximum number of sliding blocks that the ends of turns may protect from being evicted first.
    turn_blocks: usize,
    full: Pool,
    sliding: Pool,
    nodes: Vec<Node>,
    unused_nodes: Vec<NodeId>,
    by_chain: HashMap<u64, NodeId>,
    /// The keys of the hashes of chains. They are random in each process.
    hasher: RandomState,
    /// The nodes whose full block can be evicted, because no table has it and the node has no children.
    full_order: BTreeSet<FullKey>,
    /// The nodes whose sliding block can be evicted.
    sliding_order: BTreeSet<SlidingKey>,
    /// The turns whose ends protect blocks, with their nodes; the oldest first.
    turns: VecDeque<(u64, Vec<NodeId>)>,
    next_turn: u64,
    clock: u64,
}

impl BlockManager {
    /// A manager whose blocks are all free. `turn_blocks` is the maximum number of sliding blocks that are protected
    /// because a turn ended there.
    pub fn new(limits: KvLimits, turn_blocks: usize) -> Self {
        assert!(limits.block_size > 0, "a KV block holds at least one token");
        Self {
            limits,
            turn_blocks,
            full: Pool::new(limits.full_blocks),
            sliding: Pool::new(if limits.sliding_window.is_some() { limits.sliding_blocks } else { 0 }),
            nodes: Vec::new(),
            unused_nodes: Vec::new(),
            by_chain: HashMap::new(),
            hasher: RandomState::new(),
            full_order: BTreeSet::new(),
            sliding_order: BTreeSet::new(),
            turns: VecDeque::new(),
            next_turn: 1,
            clock: 0,
        }
    }

    pub fn usage(&self, pool: BlockPool) -> PoolUse {
        let pool = self.pool(pool);
        let held = pool.holders.len() - pool.available();
        PoolUse { free: pool.free.len(), cached: pool.cached, held }
    }

    /// A table for a sequence that starts with `tokens`, and the number of tokens that need not be computed: whole
    /// blocks that were computed under the same salt. These are never all of `tokens`, because the logits of the last
    /// token are needed.
    pub fn admit(&mut self, tokens: &[u32], priority: Priority, salt: &CacheSalt) -> (BlockTable, usize) {
        let path = self.longest_path(tokens, salt);
        let blocks = self.usable(&path);
        let nodes = path[..blocks].to_vec();
        let mut table = BlockTable { priority, salt: salt.clone(), ..BlockTable::default() };
        if self.limits.sliding_window.is_some() {
            table.sliding_first = self.first_needed(blocks * self.limits.block_size);
        }
        for (i, id) in nodes.iter().enumerate() {
            self.mark_used(*id, priority);
            let block = self.nodes[*id as usize].full;
            self.hold(BlockPool::Full, block);
            table.full.push(block);
            if self.limits.sliding_window.is_some() && i >= table.sliding_first {
                let block = self.nodes[*id as usize].sliding.expect("usable blocks have both");
                self.hold(BlockPool::Sliding, block);
                table.sliding.push_back(block);
            }
        }
        table.nodes = nodes;
        (table, blocks * self.limits.block_size)
    }

    /// The number of full blocks that [`BlockManager::admit`] would find for `tokens` and that are already in a table.
    pub fn held_prefix(&self, tokens: &[u32], salt: &CacheSalt) -> usize {
        let path = self.longest_path(tokens, salt);
        let held = |id: &&NodeId| self.full.holders[self.nodes[**id as usize].full as usize] > 0;
        path[..self.usable(&path)].iter().take_while(held).count()
    }

    /// The number of blocks of each pool that `table` lacks for positions `..tokens`.
    pub fn missing(&self, table: &BlockTable, tokens: usize) -> [usize; 2] {
        let blocks = tokens.div_ceil(self.limits.block_size);
        let missing = |pool| blocks.saturating_sub(table.num_blocks(pool));
        [
            missing(BlockPool::Full),
            if self.limits.sliding_window.is_some() { missing(BlockPool::Sliding) } else { 0 },
        ]
    }

    /// Whether each pool has this number of blocks that are free or can be evicted.
    pub fn has_room(&self, [full, sliding]: [usize; 2]) -> bool {
        full <= self.full.available() && sliding <= self.sliding.available()
    }

    /// Grows `table` until it has blocks for positions `..tokens`. If a pool has too few blocks, the table does not
    /// change.
    pub fn grow(&mut self, table: &mut BlockTable, tokens: usize) -> Result<(), NoRoom> {
        let missing = self.missing(table, tokens);
        if !self.has_room(missing) {
            return Err(NoRoom);
        }
        for _ in 0..missing[0] {
            let block = self.allocate(BlockPool::Full);
            table.full.push(block);
        }
        for _ in 0..missing[1] {
            let block = self.allocate(BlockPool::Sliding);
            table.sliding.push_back(block);
        }
        Ok(())
    }

    /// The block of `position` in each pool, if other tables have it too.
    pub fn shared_at(&self, table: &BlockTable, position: usize) -> [Option<u32>; 2] {
        let index = position / self.limits.block_size;
        let full = table.full.get(index).copied();
        let sliding = index.checked_sub(table.sliding_first).and_then(|i| table.sliding.get(i)).copied();
        [
            full.filter(|block| self.full.holders[*block as usize] > 1),
            sliding.filter(|block| self.sliding.holders[*block as usize] > 1),
        ]
    }

    /// Replaces shared blocks of `position` with the table's own ones, because the blocks are about to be written.
    /// Returns the copies that the device must make first.
    pub fn make_writable(
        &mut self,
        table: &mut BlockTable,
        position: usize,
    ) -> Result<Vec<BlockCopy>, NoRoom> {
        let index = position / self.limits.block_size;
        let shared = self.shared_at(table, position);
        if !self.has_room(shared.map(|block| usize::from(block.is_some()))) {
            return Err(NoRoom);
        }
        let mut copies = Vec::new();
        for (pool, from) in [BlockPool::Full, BlockPool::Sliding].into_iter().zip(shared) {
            let Some(from) = from else { continue };
            assert!(
                self.pool(pool).node[from as usize].is_none(),
                "a registered block is about to be written"
            );
            let to = self.allocate(pool);
            self.release_block(pool, from);
            match pool {
                BlockPool::Full => table.full[index] = to,
                BlockPool::Sliding => table.sliding[index - table.sliding_first] = to,
            }
            copies.push(BlockCopy { pool, from, to });
        }
        Ok(copies)
    }

    /// A second table for the same positions, which shares all blocks.
    pub fn fork(&mut self, table: &BlockTable) -> BlockTable {
        for block in &table.full {
            self.hold(BlockPool::Full, *block);
        }
        for block in &table.sliding {
            self.hold(BlockPool::Sliding, *block);
        }
        BlockTable {
            full: table.full.clone(),
            sliding: table.sliding.clone(),
            sliding_first: table.sliding_first,
            nodes: table.nodes.clone(),
            priority: table.priority,
            salt: table.salt.clone(),
            forgotten: table.forgotten,
        }
    }

    /// Registers every block whose positions are all in `tokens`, which are computed. Releases the sliding blocks
    /// before the window of the next position. If another sequence with the same salt registered the same tokens first,
    /// the table gets that block instead of its own. Blocks of a dropped text are not registered.
    pub fn commit(&mut self, table: &mut BlockTable, tokens: &[u32]) {
        let size = self.limits.block_size;
        let whole = if table.forgotten { 0 } else { tokens.len() / size };
        for (index, tokens) in tokens.chunks_exact(size).enumerate().take(whole).skip(table.nodes.len()) {
            let parent = table.next_parent();
            let chain = self.chain(&parent, tokens);
            let id = match self.find(chain, &parent, tokens) {
                Ok(Some(id)) if self.share_full(table, index, id) => id,
                // Forks share this block. If it were replaced here, the forks would not have the registered block.
                Ok(Some(_)) => break,
                Ok(None) => self.register(parent, chain, tokens, table),
                // Two chains have the same hash. The second one is not cached.
                Err(Collision) => break,
            };
            self.mark_used(id, table.priority);
            table.nodes.push(id);
            if let Some(i) = index.checked_sub(table.sliding_first).filter(|i| *i < table.sliding.len()) {
                self.share_sliding(table, i, id);
            }
        }
        self.leave_window(table, tokens.len());
    }

    /// Releases the sliding blocks that no position from `next` on needs.
    pub fn leave_window(&mut self, table: &mut BlockTable, next: usize) {
        self.clock += 1;
        let first = self.first_needed(next);
        while table.sliding_first < first {
            let Some(block) = table.sliding.pop_front() else { break };
            table.sliding_first += 1;
            self.release_block(BlockPool::Sliding, block);
        }
    }

    /// Records that a turn of a conversation ends after the registered tokens of `table`. The next turn starts there,
    /// so the window before that position is evicted last. Background requests have no next turn.
    pub fn end_turn(&mut self, table: &BlockTable) {
        if table.priority == Priority::Background {
            return;
        }
        let first = self.first_needed(table.nodes.len() * self.limits.block_size);
        let window = &table.nodes[first.min(table.nodes.len())..];
        if self.limits.sliding_window.is_none() || window.is_empty() {
            return;
        }
        let turn = self.next_turn;
        self.next_turn += 1;
        let nodes: Vec<NodeId> =
            window.iter().copied().filter(|id| self.nodes[*id as usize].sliding.is_some()).collect();
        for id in &nodes {
            self.set_turn(*id, turn);
        }
        self.turns.push_back((turn, nodes));
        self.limit_turns();
    }

    /// Releases every block of `table`. Registered blocks stay cached.
    pub fn release(&mut self, table: BlockTable) {
        self.clock += 1;
        for block in table.full.into_iter().rev() {
            self.release_block(BlockPool::Full, block);
        }
        for block in table.sliding.into_iter().rev() {
            self.release_block(BlockPool::Sliding, block);
        }
    }

    /// Releases the table of a sequence whose logits are not finite. Drops its text and all texts that begin with its
    /// first block from the cache, so that sequences that start with the same tokens compute them again. `others` are
    /// the tables of all other sequences. Tables that share the first block keep their blocks, but no other sequence
    /// finds these blocks, nor blocks that these sequences add. If the shared blocks are wrong, these sequences fail
    /// too.
    pub fn forget<'a>(&mut self, table: BlockTable, others: impl Iterator<Item = &'a mut BlockTable>) {
        if let Some(&first) = table.full.first() {
            for other in others.filter(|other| other.full.first() == Some(&first)) {
                other.nodes.clear();
                other.forgotten = true;
            }
            // There is no node if the block was not complete yet, or if another sequence's block was registered
            // instead.
            if let Some(root) = self.full.node[first as usize] {
                self.unregister_tree(root);
            }
        }
        self.release(table);
    }

    // --- the prefix cache ---

    /// The cached nodes of `tokens` under a salt, from the first block on. The block of the last token is never
    /// included.
    fn longest_path(&self, tokens: &[u32], salt: &CacheSalt) -> Vec<NodeId> {
        let mut path: Vec<NodeId> = Vec::new();
        let mut parent = Parent::Root(salt.clone());
        let known = &tokens[..tokens.len().saturating_sub(1)];
        for tokens in known.chunks_exact(self.limits.block_size) {
            let Ok(Some(id)) = self.find(self.chain(&parent, tokens), &parent, tokens) else { break };
            path.push(id);
            parent = Parent::Node(id);
        }
        path
    }

    /// The number of blocks of `path` that a sequence can skip: the largest number for which the window before the next
    /// position is complete.
    fn usable(&self, path: &[NodeId]) -> usize {
        if self.limits.sliding_window.is_none() {
            return path.len();
        }
        // `row`: the number of successive sliding blocks up to the current block.
        let (mut row, mut usable) = (0, 0);
        for (i, id) in path.iter().enumerate() {
            row = if self.nodes[*id as usize].sliding.is_some() { row + 1 } else { 0 };
            let blocks = i + 1;
            if row >= blocks - self.first_needed(blocks * self.limits.block_size) {
                usable = blocks;
            }
        }
        usable
    }

    /// The first block that a sliding layer needs at `position`.
    fn first_needed(&self, position: usize) -> usize {
        self.limits
            .sliding_window
            .map_or(0, |window| (position + 1).saturating_sub(window) / self.limits.block_size)
    }

    fn chain(&self, parent: &Parent, tokens: &[u32]) -> u64 {
        match parent {
            Parent::Root(salt) => self.hasher.hash_one((salt, tokens)),
            Parent::Node(id) => self.hasher.hash_one((self.nodes[*id as usize].chain, tokens)),
        }
    }

    /// The node with the parent `parent` and these tokens, whose chain is `chain`. Different texts may have the same
    /// hash, so parent and tokens are compared too. The parent represents all earlier tokens and the salt: they were
    /// compared when the parent was looked up.
    fn find(&self, chain: u64, parent: &Parent, tokens: &[u32]) -> Result<Option<NodeId>, Collision> {
        let Some(&id) = self.by_chain.get(&chain) else { return Ok(None) };
        let node = &self.nodes[id as usize];
        if node.parent == *parent && *node.tokens == *tokens { Ok(Some(id)) } else { Err(Collision) }
    }

    /// Registers the first unregistered block of `table`.
    fn register(&mut self, parent: Parent, chain: u64, tokens: &[u32], table: &BlockTable) -> NodeId {
        let parent_node = parent.node();
        let full = table.full[table.nodes.len()];
        let node = Node {
            parent,
            chain,
            tokens: tokens.into(),
            children: 0,
            full,
            sliding: None,
            used: [self.clock; 2],
            turn: 0,
            priority: table.priority,
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
        if let Some(parent) = parent_node {
            self.nodes[parent as usize].children += 1;
        }
        self.by_chain.insert(chain, id);
        self.full.node[full as usize] = Some(id);
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
        let node = &mut self.nodes[id as usize];
        self.full_order.remove(&node.full_key(id));
        self.sliding_order.remove(&node.sliding_key(id));
        self.by_chain.remove(&node.chain);
        self.full.unregister(node.full);
        if let Some(block) = node.sliding.take() {
            self.sliding.unregister(block);
        }
        node.turn = 0;
        self.unused_nodes.push(id);
    }

    /// Replaces the table's own full block by the registered block of `id`. Returns false if other tables have its own
    /// block too.
    fn share_full(&mut self, table: &mut BlockTable, index: usize, id: NodeId) -> bool {
        let (own, shared) = (table.full[index], self.nodes[id as usize].full);
        if own != shared {
            if self.full.holders[own as usize] > 1 {
                return false;
            }
            self.hold(BlockPool::Full, shared);
            self.release_block(BlockPool::Full, own);
            table.full[index] = shared;
        }
        true
    }

    /// Registers the table's sliding block with `id`, or replaces it by the block that is already registered there.
    fn share_sliding(&mut self, table: &mut BlockTable, index: usize, id: NodeId) {
        let own = table.sliding[index];
        match self.nodes[id as usize].sliding {
            Some(shared) if shared == own => {}
            Some(shared) => {
                self.hold(BlockPool::Sliding, shared);
                self.release_block(BlockPool::Sliding, own);
                table.sliding[index] = shared;
            }
            None => {
                self.nodes[id as usize].sliding = Some(own);
                self.sliding.node[own as usize] = Some(id);
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
        let node = &mut self.nodes[id as usize];
        let full = self.full_order.remove(&node.full_key(id));
        let sliding = self.sliding_order.remove(&node.sliding_key(id));
        change(node);
        if full {
            self.full_order.insert(node.full_key(id));
        }
        if sliding {
            self.sliding_order.insert(node.sliding_key(id));
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

    fn pool(&self, pool: BlockPool) -> &Pool {
        match pool {
            BlockPool::Full => &self.full,
            BlockPool::Sliding => &self.sliding,
        }
    }

    fn pool_mut(&mut self, pool: BlockPool) -> &mut Pool {
        match pool {
            BlockPool::Full => &mut self.full,
            BlockPool::Sliding => &mut self.sliding,
        }
    }

    /// Allocates a block for one table. The caller must check that there is room.
    fn allocate(&mut self, pool: BlockPool) -> u32 {
        if self.pool(pool).free.is_empty() {
            match pool {
                BlockPool::Full => self.evict_full(),
                BlockPool::Sliding => self.evict_sliding(),
            }
        }
        let pool = self.pool_mut(pool);
        let block = pool.free.pop().expect("the caller has checked that there is room");
        pool.holders[block as usize] = 1;
        block
    }

    /// Counts one more table that has the block.
    fn hold(&mut self, pool: BlockPool, block: u32) {
        let which = self.pool_mut(pool);
        let holders = &mut which.holders[block as usize];
        *holders += 1;
        if *holders > 1 {
            return;
        }
        let id = which.node[block as usize].expect("a block without holders is cached");
        which.cached -= 1;
        let node = &self.nodes[id as usize];
        match pool {
            BlockPool::Full => self.full_order.remove(&node.full_key(id)),
            BlockPool::Sliding => self.sliding_order.remove(&node.sliding_key(id)),
        };
    }

    /// Counts one table less that has the block. Without tables, the block becomes cached or free.
    fn release_block(&mut self, pool: BlockPool, block: u32) {
        let clock = self.clock;
        let which = self.pool_mut(pool);
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
        let node = &mut self.nodes[id as usize];
        match pool {
            BlockPool::Full => {
                node.used[0] = clock;
                if node.children == 0 {
                    self.full_order.insert(node.full_key(id));
                }
            }
            BlockPool::Sliding => {
                node.used[1] = clock;
                self.sliding_order.insert(node.sliding_key(id));
            }
        }
    }

    /// Evicts the full block with the lowest key, and its node with it.
    fn evict_full(&mut self) {
        let (.., id) = *self.full_order.first().expect("the caller has checked that there is room");
        self.unregister(id);
        if let Some(parent) = self.nodes[id as usize].parent.node() {
            let node = &mut self.nodes[parent as usize];
            node.children -= 1;
            if node.children == 0 && self.full.holders[node.full as usize] == 0 {
                self.full_order.insert(node.full_key(parent));
            }
        }
    }

    fn evict_sliding(&mut self) {
        let (.., id) = self.sliding_order.pop_first().expect("the caller has checked that there is room");
        let node = &mut self.nodes[id as usize];
        self.sliding.unregister(node.sliding.take().expect("a listed node has a sliding block"));
        node.turn = 0;
    }

    /// Panics if an invariant is broken. `tables` are all tables.
    pub fn check<'a>(&self, tables: impl Iterator<Item = &'a BlockTable>) {
        let mut held = [vec![0; self.full.holders.len()], vec![0; self.sliding.holders.len()]];
        let mut salts = HashMap::new();
        for table in tables {
            table.full.iter().for_each(|block| held[0][*block as usize] += 1);
            table.sliding.iter().for_each(|block| held[1][*block as usize] += 1);
            let named =
                table.full.iter().map(|block| (0, block)).chain(table.sliding.iter().map(|block| (1, block)));
            for block in named {
                let salt = *salts.entry(block).or_insert(&table.salt);
                assert_eq!(*salt, table.salt, "block {block:?} is shared by two salts");
            }
            assert!(table.nodes.len() <= table.full.len(), "more blocks are registered than the table has");
            assert!(table.nodes.is_empty() || !table.forgotten, "blocks of a dropped text are registered");
            for (index, id) in table.nodes.iter().enumerate() {
                let node = &self.nodes[*id as usize];
                assert_eq!(node.full, table.full[index], "block {index} is not the registered one");
                let before = index.checked_sub(1).map(|i| Parent::Node(table.nodes[i]));
                let expected = before.unwrap_or_else(|| Parent::Root(table.salt.clone()));
                assert_eq!(node.parent, expected, "the parent of block {index}");
                if let Some(own) = index.checked_sub(table.sliding_first).and_then(|i| table.sliding.get(i)) {
                    assert_eq!(node.sliding, Some(*own), "sliding block {index} is not the registered one");
                }
            }
        }
        for (pool, held) in [(&self.full, &held[0]), (&self.sliding, &held[1])] {
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
        let (mut leaves, mut windows) = (0, 0);
        for (chain, &id) in &self.by_chain {
            let node = &self.nodes[id as usize];
            assert_eq!(node.chain, *chain);
            assert_eq!(self.full.node[node.full as usize], Some(id), "a node's full block");
            let held = self.full.holders[node.full as usize] > 0;
            if let Some(parent) = node.parent.node() {
                children[parent as usize] += 1;
                let parent = &self.nodes[parent as usize];
                assert!(parent.priority <= node.priority, "the parent of a node is evicted before the node");
                assert!(
                    !held || self.full.holders[parent.full as usize] > 0,
                    "a block is held, but its parent is not"
                );
            }
            if !held && node.children == 0 {
                leaves += 1;
                assert!(
                    self.full_order.contains(&node.full_key(id)),
                    "a full block that can be evicted is not listed"
                );
            }
            if let Some(block) = node.sliding {
                assert_eq!(self.sliding.node[block as usize], Some(id), "a node's sliding block");
                if self.sliding.holders[block as usize] == 0 {
                    windows += 1;
                    assert!(
                        self.sliding_order.contains(&node.sliding_key(id)),
                        "a sliding block that can be evicted is not listed"
                    );
                }
            }
        }
        assert_eq!(
            (leaves, windows),
            (self.full_order.len(), self.sliding_order.len()),
            "the numbers of blocks that can be evicted"
        );
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
    const LIMITS: KvLimits =
        KvLimits { block_size: SIZE, full_blocks: 24, sliding_blocks: 16, sliding_window: Some(4) };

    fn salt(n: usize) -> CacheSalt {
        CacheSalt::new(["", "a", "b"][n].as_bytes())
    }

    #[test]
    fn texts_with_the_same_hash_under_different_salts_share_no_blocks() {
        let mut blocks = BlockManager::new(LIMITS, 0);
        let text = [1, 2, 3, 4, 5];
        let compute = |blocks: &mut BlockManager, salt: &CacheSalt| {
            let (mut table, cached) = blocks.admit(&text, Priority::Interactive, salt);
            blocks.grow(&mut table, text.len()).unwrap();
            blocks.commit(&mut table, &text);
            blocks.release(table);
            cached
        };
        let [one, other] = [salt(1), salt(2)];
        assert_eq!([compute(&mut blocks, &one), compute(&mut blocks, &one)], [0, 4]);
        let [first, forged] =
            [&one, &other].map(|salt| blocks.chain(&Parent::Root(salt.clone()), &text[..SIZE]));
        blocks.by_chain.insert(forged, blocks.by_chain[&first]);
        assert_eq!([compute(&mut blocks, &other), compute(&mut blocks, &other)], [0, 0]);
        assert_eq!(compute(&mut blocks, &one), 4);
    }

    /// A text that a sequence computes.
    struct Text {
        tokens: Vec<u32>,
        computed: usize,
        salt: usize,
        table: BlockTable,
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
    #[derive(Default)]
    struct Contents {
        pools: [HashMap<u32, Content>; 2],
        beginnings: usize,
    }

    impl Contents {
        fn copy(&mut self, BlockCopy { pool, from, to }: BlockCopy, begins: bool) {
            self.beginnings += 1;
            let blocks = &mut self.pools[usize::from(pool == BlockPool::Sliding)];
            let mut content = blocks[&from].clone();
            if begins {
                content.beginning = self.beginnings;
            }
            blocks.insert(to, content);
        }

        fn beginning(&self, table: &BlockTable) -> usize {
            self.pools[0][&table.full[0]].beginning
        }

        /// Computes the tokens of a text up to `end`.
        fn write(&mut self, text: &Text, end: usize) {
            self.beginnings += 1;
            let beginning = if text.computed == 0 { self.beginnings } else { self.beginning(&text.table) };
            for index in text.computed / SIZE..end.div_ceil(SIZE) {
                let tokens = text.tokens[..end.min((index + 1) * SIZE)].to_vec();
                let content = Content { text: tokens, salt: text.salt, beginning };
                self.pools[0].insert(text.table.full[index], content.clone());
                self.pools[1].insert(text.table.sliding[index - text.table.sliding_first], content);
            }
        }

        /// Panics unless the blocks of a text have the contents of that text under the same salt.
        fn check(&self, text: &Text) {
            let first = text.table.sliding_first;
            for index in 0..text.computed.div_ceil(SIZE) {
                let expected = (text.salt, &text.tokens[..text.computed.min((index + 1) * SIZE)]);
                let found = |pool: usize, block: &u32| {
                    let content = &self.pools[pool][block];
                    assert_eq!((content.salt, &content.text[..]), expected, "block {index} of pool {pool}");
                };
                found(0, &text.table.full[index]);
                index
                    .checked_sub(first)
                    .and_then(|i| text.table.sliding.get(i))
                    .inspect(|block| found(1, block));
            }
        }
    }

    /// There are few tokens and few blocks, so that texts have common beginnings, and lose blocks.
    #[test]
    fn a_cache_hit_has_the_text_and_the_salt_of_its_sequence_and_is_never_dropped() {
        let seed = 0xb10c;
        println!("seed {seed}");
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let (mut hits, mut forks, mut dropped) = (0, 0, 0);
        for _ in 0..60 {
            let mut blocks = BlockManager::new(LIMITS, rng.random_range(0..8));
            let (mut contents, mut texts) = (Contents::default(), Vec::<Text>::new());
            let mut forgotten = HashSet::new();
            for _ in 0..1500 {
                let chosen = (!texts.is_empty()).then(|| rng.random_range(0..texts.len()));
                match (rng.random_range(0..10), chosen) {
                    (0..3, _) if texts.len() < 6 => {
                        let len = rng.random_range(1..16);
                        let tokens: Vec<u32> = (0..len).map(|_| rng.random_range(0..2)).collect();
                        let salt_n = rng.random_range(0..3);
                        let priority =
                            if rng.random() { Priority::Interactive } else { Priority::Background };
                        let held = blocks.held_prefix(&tokens, &salt(salt_n));
                        let (table, computed) = blocks.admit(&tokens, priority, &salt(salt_n));
                        assert!(held * SIZE <= computed && computed < len);
                        if computed > 0 {
                            hits += 1;
                            assert!(!forgotten.contains(&contents.beginning(&table)), "the text was dropped");
                        }
                        texts.push(Text { tokens, computed, salt: salt_n, table });
                    }
                    (3, Some(i)) if texts[i].computed > 0 && texts.len() < 6 => {
                        let Text { ref tokens, computed, salt, ref table } = texts[i];
                        let (tokens, table) = (tokens[..computed].to_vec(), blocks.fork(table));
                        texts.push(Text { tokens, computed, salt, table });
                        forks += 1;
                    }
                    (4, Some(i)) => {
                        let Text { table, .. } = texts.swap_remove(i);
                        blocks.end_turn(&table);
                        blocks.release(table);
                    }
                    (5, Some(i)) if texts[i].computed > 0 && rng.random_bool(0.3) => {
                        let Text { table, .. } = texts.swap_remove(i);
                        let cached = blocks.usage(BlockPool::Full).cached;
                        forgotten.insert(contents.beginning(&table));
                        blocks.forget(table, texts.iter_mut().map(|text| &mut text.table));
                        dropped += usize::from(blocks.usage(BlockPool::Full).cached < cached);
                    }
                    (_, Some(i)) => {
                        let text = &mut texts[i];
                        if text.computed == text.tokens.len() {
                            text.tokens.push(rng.random_range(0..2));
                        }
                        let end = rng.random_range(text.computed + 1..=text.tokens.len());
                        let shared = blocks.shared_at(&text.table, text.computed);
                        let mut wanted = blocks.missing(&text.table, end);
                        wanted
                            .iter_mut()
                            .zip(shared)
                            .for_each(|(n, block)| *n += usize::from(block.is_some()));
                        if !blocks.has_room(wanted) {
                            blocks.release(texts.swap_remove(i).table);
                            continue;
                        }
                        blocks.grow(&mut text.table, end).unwrap();
                        for copy in blocks.make_writable(&mut text.table, text.computed).unwrap() {
                            contents.copy(copy, text.computed < SIZE);
                        }
                        contents.write(text, end);
                        text.computed = end;
                        blocks.commit(&mut text.table, &text.tokens[..end]);
                    }
                    _ => {}
                }
                blocks.check(texts.iter().map(|text| &text.table));
                texts.iter().for_each(|text| contents.check(text));
            }
        }
        println!("{hits} hits, {forks} forks, {dropped} dropped texts that others would have found");
        assert!(hits > 500 && forks > 500 && dropped > 100, "too few cases");
    }
}
