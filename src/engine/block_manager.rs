//! The KV pools, who holds each block, and the prefix cache.
//!
//! There are two pools, because Gemma-3's layers are of two kinds: a full layer keeps every token of a sequence, a
//! sliding layer only its window. A sequence's [`BlockTable`] names a block of each pool for every `block_size`
//! positions; in the sliding pool those before the window are let go while the sequence runs.
//!
//! ```text
//! positions   0   16   32   48   64   80        window of 32, at position 80
//! full        f0 | f1 | f2 | f3 | f4 |
//! sliding      -    -  | s2 | s3 | s4 |
//! ```
//!
//! A block whose tokens are all computed is *registered*: it becomes (part of) a [`Node`] of the prefix cache, which is
//! found by its salt and the chain of its tokens and those before it. Registered blocks are never written again, are
//! shared by every sequence of that salt that starts with the same tokens, and stay when the last of them ends, until the
//! room is needed. Nobody finds what another salt has: neither its contents nor its being there.
//! A hit at position `p` needs the full blocks of everything before `p` and the sliding blocks of the window before `p`
//! (no fewer: sliding layers feed each other, so the window alone cannot be computed again).
//!
//! A text whose logits are no numbers is forgotten from its first block on ([`BlockManager::forget`]), with all that builds on
//! it: which of its blocks is wrong, nobody knows.
//!
//! What goes first where room is needed: what background sequences alone have used, then the rest; of full blocks in either
//! the longest unused one that no other builds on; of sliding blocks those that no turn of a conversation ended in, then
//! those of the oldest turn. So background sequences take their room from one another, once they have some.
//!
//! Invariants, checked by [`BlockManager::check`]: a block is free, cached (registered, held by none) or held, and is held
//! as often as tables name it; whoever holds a full block holds those before it; a sliding block is registered only
//! beside its full block; tables that share a block have one salt; what an interactive sequence has used builds on such
//! blocks alone.

use std::cmp::Reverse;
use std::collections::hash_map::RandomState;
use std::collections::{BTreeSet, HashMap, VecDeque};
use std::hash::BuildHasher;

use super::request::{CacheSalt, Priority};
use crate::model::{BlockCopy, BlockPool, KvLimits};

/// The blocks of one sequence: what [`BlockManager::admit`] gives and [`BlockManager::release`] takes back.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct BlockTable {
    /// Block `i` holds positions `i * block_size ..`.
    full: Vec<u32>,
    /// The same for sliding layers, from block `sliding_first` on.
    sliding: VecDeque<u32>,
    sliding_first: usize,
    /// The registered ones of `full`, from the first on.
    nodes: Vec<NodeId>,
    /// Of the sequence.
    priority: Priority,
    salt: CacheSalt,
    /// What it begins with was forgotten: nothing of it is registered any more.
    forgotten: bool,
}

impl BlockTable {
    /// Blocks of the full layers, from position 0 on.
    pub fn full(&self) -> &[u32] {
        &self.full
    }

    /// Blocks of the sliding layers, and the index of the first of them among the sequence's blocks.
    pub fn sliding(&self) -> (usize, impl Iterator<Item = u32> + '_) {
        (self.sliding_first, self.sliding.iter().copied())
    }

    pub(super) fn salt(&self) -> &CacheSalt {
        &self.salt
    }

    /// What its next block to be registered stands behind.
    fn end(&self) -> Behind {
        self.nodes.last().map_or_else(|| Behind::Nothing(self.salt.clone()), |id| Behind::Node(*id))
    }

    fn of(&self, pool: BlockPool) -> usize {
        match pool {
            BlockPool::Full => self.full.len(),
            BlockPool::Sliding => self.sliding_first + self.sliding.len(),
        }
    }
}

type NodeId = u32;

/// What the tokens of a block stand behind.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Behind {
    /// They begin a text of this salt, which is that of all that builds on them.
    Nothing(CacheSalt),
    Node(NodeId),
}

impl Behind {
    fn parent(&self) -> Option<NodeId> {
        match self {
            Behind::Nothing(_) => None,
            Behind::Node(id) => Some(*id),
        }
    }
}

/// A registered block of `block_size` tokens.
#[derive(Debug)]
struct Node {
    behind: Behind,
    /// Hash of the tokens, and of the parent's chain or the salt.
    chain: u64,
    tokens: Box<[u32]>,
    /// Nodes that stand behind this one directly.
    children: u32,
    full: u32,
    sliding: Option<u32>,
    /// When the full block, and the sliding block, was last let go.
    used: [u64; 2],
    /// The newest turn whose end needs the sliding block; 0 is none.
    turn: u64,
    /// The first class, in their order, that has used it.
    priority: Priority,
}

/// In which order full blocks go, the first one first.
type FullKey = (Reverse<Priority>, u64, NodeId);
/// The same for sliding blocks.
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
    /// Tables that name the block, by block.
    holders: Vec<u32>,
    /// By block.
    node: Vec<Option<NodeId>>,
    free: Vec<u32>,
    /// Registered blocks that nobody holds.
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

    /// Makes a registered block its holders' alone, or free.
    fn unregister(&mut self, block: u32) {
        self.node[block as usize] = None;
        if self.holders[block as usize] == 0 {
            self.cached -= 1;
            self.free.push(block);
        }
    }
}

/// How many blocks are in which state.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PoolUse {
    pub free: usize,
    /// Of the prefix cache alone: free to whoever needs them.
    pub cached: usize,
    pub held: usize,
}

/// No block is free, and none can be made free.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NoRoom;

#[derive(Debug)]
pub struct BlockManager {
    limits: KvLimits,
    /// Sliding blocks that ends of turns may keep from going first.
    turn_blocks: usize,
    full: Pool,
    sliding: Pool,
    nodes: Vec<Node>,
    unused_nodes: Vec<NodeId>,
    by_chain: HashMap<u64, NodeId>,
    /// What the chains are made with: another process has other ones.
    hasher: RandomState,
    /// Nodes whose full block can go: nobody holds it, and no node builds on it.
    full_order: BTreeSet<FullKey>,
    /// Nodes whose sliding block can go.
    sliding_order: BTreeSet<SlidingKey>,
    /// Ends of turns, oldest first, and their nodes.
    turns: VecDeque<(u64, Vec<NodeId>)>,
    next_turn: u64,
    clock: u64,
}

impl BlockManager {
    /// Everything free. `turn_blocks`: sliding blocks that may be kept because a turn ended in them.
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

    /// A table for a sequence that starts with `tokens`, and how many of them it need not compute: whole blocks that were
    /// computed under the same salt, and never all of `tokens`, for the last one's logits are wanted.
    pub fn admit(&mut self, tokens: &[u32], priority: Priority, salt: &CacheSalt) -> (BlockTable, usize) {
        let path = self.longest_path(tokens, salt);
        let blocks = self.usable(&path);
        let nodes = path[..blocks].to_vec();
        let mut table = BlockTable { priority, salt: salt.clone(), ..BlockTable::default() };
        if self.limits.sliding_window.is_some() {
            table.sliding_first = self.first_needed(blocks * self.limits.block_size);
        }
        for (i, id) in nodes.iter().enumerate() {
            self.use_as(*id, priority);
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

    /// Full blocks that [`BlockManager::admit`] would find for `tokens` and that somebody holds already.
    pub fn held_prefix(&self, tokens: &[u32], salt: &CacheSalt) -> usize {
        let path = self.longest_path(tokens, salt);
        let held = |id: &&NodeId| self.full.holders[self.nodes[**id as usize].full as usize] > 0;
        path[..self.usable(&path)].iter().take_while(held).count()
    }

    /// Blocks of each pool that `table` lacks for positions `..tokens`.
    pub fn missing(&self, table: &BlockTable, tokens: usize) -> [usize; 2] {
        let blocks = tokens.div_ceil(self.limits.block_size);
        let missing = |pool| blocks.saturating_sub(table.of(pool));
        [
            missing(BlockPool::Full),
            if self.limits.sliding_window.is_some() { missing(BlockPool::Sliding) } else { 0 },
        ]
    }

    /// Whether that many blocks of each pool could be had at once.
    pub fn has_room(&self, [full, sliding]: [usize; 2]) -> bool {
        full <= self.full.available() && sliding <= self.sliding.available()
    }

    /// Grows `table` until it holds positions `..tokens`; nothing is taken where a pool lacks blocks.
    pub fn grow(&mut self, table: &mut BlockTable, tokens: usize) -> Result<(), NoRoom> {
        let missing = self.missing(table, tokens);
        if !self.has_room(missing) {
            return Err(NoRoom);
        }
        for _ in 0..missing[0] {
            let block = self.take(BlockPool::Full);
            table.full.push(block);
        }
        for _ in 0..missing[1] {
            let block = self.take(BlockPool::Sliding);
            table.sliding.push_back(block);
        }
        Ok(())
    }

    /// The blocks of `position` in each pool, where other tables name them too.
    pub fn shared_at(&self, table: &BlockTable, position: usize) -> [Option<u32>; 2] {
        let index = position / self.limits.block_size;
        let full = table.full.get(index).copied();
        let sliding = index.checked_sub(table.sliding_first).and_then(|i| table.sliding.get(i)).copied();
        [
            full.filter(|block| self.full.holders[*block as usize] > 1),
            sliding.filter(|block| self.sliding.holders[*block as usize] > 1),
        ]
    }

    /// Makes the block of `position` the table's own, for it is about to be written: the copies that must be made on the
    /// device first.
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
            let to = self.take(pool);
            self.let_go(pool, from);
            match pool {
                BlockPool::Full => table.full[index] = to,
                BlockPool::Sliding => table.sliding[index - table.sliding_first] = to,
            }
            copies.push(BlockCopy { pool, from, to });
        }
        Ok(copies)
    }

    /// A second table for the same positions; what both name is shared.
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

    /// Registers every block whose positions are all in `tokens`, which are computed, and lets go of those that the window
    /// of the next position has left. Where another sequence of its salt registered the same tokens first, that one's block
    /// takes the place of this one's. A forgotten text has nothing registered.
    pub fn commit(&mut self, table: &mut BlockTable, tokens: &[u32]) {
        let size = self.limits.block_size;
        let whole = if table.forgotten { 0 } else { tokens.len() / size };
        for (index, tokens) in tokens.chunks_exact(size).enumerate().take(whole).skip(table.nodes.len()) {
            let behind = table.end();
            let chain = self.chain(&behind, tokens);
            let id = match self.find(chain, &behind, tokens) {
                Ok(Some(id)) if self.share_full(table, index, id) => id,
                // Forks have the same block, and would not hold the one that was registered before.
                Ok(Some(_)) => break,
                Ok(None) => self.register(behind, chain, tokens, table),
                // Two chains with one hash: the second is not cached.
                Err(Collision) => break,
            };
            self.use_as(id, table.priority);
            table.nodes.push(id);
            if let Some(i) = index.checked_sub(table.sliding_first).filter(|i| *i < table.sliding.len()) {
                self.share_sliding(table, i, id);
            }
        }
        self.leave_window(table, tokens.len());
    }

    /// Lets go of the sliding blocks that no position from `next` on can see.
    pub fn leave_window(&mut self, table: &mut BlockTable, next: usize) {
        self.clock += 1;
        let first = self.first_needed(next);
        while table.sliding_first < first {
            let Some(block) = table.sliding.pop_front() else { break };
            table.sliding_first += 1;
            self.let_go(BlockPool::Sliding, block);
        }
    }

    /// Notes that a turn of a conversation ends behind the registered tokens of `table`: the next one will start from
    /// there, so the window there goes last. Nobody goes on from what ran in the background.
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
        self.forget_turns();
    }

    /// Takes every block of `table` back; the registered ones stay cached.
    pub fn release(&mut self, table: BlockTable) {
        self.clock += 1;
        for block in table.full.into_iter().rev() {
            self.let_go(BlockPool::Full, block);
        }
        for block in table.sliding.into_iter().rev() {
            self.let_go(BlockPool::Sliding, block);
        }
    }

    /// Releases the table of a sequence whose logits are no numbers, and forgets its text: whoever starts with the same
    /// tokens computes them, and what builds on them. Of `others`, the tables of all other sequences, those that share its
    /// first block keep what they hold, and none of it is found by anybody else, nor what they add to it: if it is wrong,
    /// they fail by themselves.
    pub fn forget<'a>(&mut self, table: BlockTable, others: impl Iterator<Item = &'a mut BlockTable>) {
        if let Some(&first) = table.full.first() {
            for other in others.filter(|other| other.full.first() == Some(&first)) {
                other.nodes.clear();
                other.forgotten = true;
            }
            // None where it was not yet whole, or another's took its place.
            if let Some(root) = self.full.node[first as usize] {
                self.unregister_tree(root);
            }
        }
        self.release(table);
    }

    // --- the prefix cache ---

    /// Nodes of `tokens` under a salt from the first block on, all but the last token's block at most.
    fn longest_path(&self, tokens: &[u32], salt: &CacheSalt) -> Vec<NodeId> {
        let mut path: Vec<NodeId> = Vec::new();
        let mut behind = Behind::Nothing(salt.clone());
        let known = &tokens[..tokens.len().saturating_sub(1)];
        for tokens in known.chunks_exact(self.limits.block_size) {
            let Ok(Some(id)) = self.find(self.chain(&behind, tokens), &behind, tokens) else { break };
            path.push(id);
            behind = Behind::Node(id);
        }
        path
    }

    /// How many blocks of `path` a sequence can start behind: the most whose window is whole.
    fn usable(&self, path: &[NodeId]) -> usize {
        if self.limits.sliding_window.is_none() {
            return path.len();
        }
        // Sliding blocks in a row that end at the block before.
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

    fn chain(&self, behind: &Behind, tokens: &[u32]) -> u64 {
        match behind {
            Behind::Nothing(salt) => self.hasher.hash_one((salt, tokens)),
            Behind::Node(id) => self.hasher.hash_one((self.nodes[*id as usize].chain, tokens)),
        }
    }

    /// The node of `tokens` behind `behind`, whose chain is `chain`. A hash alone proves nothing: tokens and salt are compared,
    /// the latter in the first node, and those of all nodes between by their being the parents.
    fn find(&self, chain: u64, behind: &Behind, tokens: &[u32]) -> Result<Option<NodeId>, Collision> {
        let Some(&id) = self.by_chain.get(&chain) else { return Ok(None) };
        let node = &self.nodes[id as usize];
        if node.behind == *behind && *node.tokens == *tokens { Ok(Some(id)) } else { Err(Collision) }
    }

    /// Makes the block behind the registered ones of `table` one of them.
    fn register(&mut self, behind: Behind, chain: u64, tokens: &[u32], table: &BlockTable) -> NodeId {
        let parent = behind.parent();
        let full = table.full[table.nodes.len()];
        let node = Node {
            behind,
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
        if let Some(parent) = parent {
            self.nodes[parent as usize].children += 1;
        }
        self.by_chain.insert(chain, id);
        self.full.node[full as usize] = Some(id);
        id
    }

    /// Takes a node that begins a text out of the cache, with all that builds on it.
    fn unregister_tree(&mut self, root: NodeId) {
        let mut behind: HashMap<NodeId, Vec<NodeId>> = HashMap::new();
        for &id in self.by_chain.values() {
            if let Some(parent) = self.nodes[id as usize].behind.parent() {
                behind.entry(parent).or_default().push(id);
            }
        }
        let mut tree = vec![root];
        while let Some(id) = tree.pop() {
            tree.extend(behind.remove(&id).into_iter().flatten());
            self.unregister(id);
        }
    }

    /// Takes a node out of the cache: its blocks are their holders' alone then, or free.
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

    /// Puts the registered full block of `id` in the place of the table's own; false where others have that one too.
    fn share_full(&mut self, table: &mut BlockTable, index: usize, id: NodeId) -> bool {
        let (own, shared) = (table.full[index], self.nodes[id as usize].full);
        if own != shared {
            if self.full.holders[own as usize] > 1 {
                return false;
            }
            self.hold(BlockPool::Full, shared);
            self.let_go(BlockPool::Full, own);
            table.full[index] = shared;
        }
        true
    }

    /// Registers the table's sliding block with `id`, or puts the one registered in its place.
    fn share_sliding(&mut self, table: &mut BlockTable, index: usize, id: NodeId) {
        let own = table.sliding[index];
        match self.nodes[id as usize].sliding {
            Some(shared) if shared == own => {}
            Some(shared) => {
                self.hold(BlockPool::Sliding, shared);
                self.let_go(BlockPool::Sliding, own);
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

    /// Notes that a sequence of that class uses the node.
    fn use_as(&mut self, id: NodeId, priority: Priority) {
        self.change(id, |node| node.priority = node.priority.min(priority));
    }

    /// Changes what decides when the blocks of a node go.
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

    /// Forgets the oldest turns until the rest is within its bound.
    fn forget_turns(&mut self) {
        // What was evicted, or belongs to a newer turn by now, is none of these any more.
        let nodes = &self.nodes;
        self.turns.retain_mut(|(turn, ids)| {
            ids.retain(|id| nodes[*id as usize].turn == *turn);
            !ids.is_empty()
        });
        let mut total: usize = self.turns.iter().map(|(_, ids)| ids.len()).sum();
        while total > self.turn_blocks {
            let (_, ids) = self.turns.pop_front().expect("blocks are kept by turns");
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

    /// A block for one holder. The caller has seen that there is room.
    fn take(&mut self, pool: BlockPool) -> u32 {
        if self.pool(pool).free.is_empty() {
            match pool {
                BlockPool::Full => self.evict_full(),
                BlockPool::Sliding => self.evict_sliding(),
            }
        }
        let pool = self.pool_mut(pool);
        let block = pool.free.pop().expect("the caller has seen that there is room");
        pool.holders[block as usize] = 1;
        block
    }

    fn hold(&mut self, pool: BlockPool, block: u32) {
        let which = self.pool_mut(pool);
        let holders = &mut which.holders[block as usize];
        *holders += 1;
        if *holders > 1 {
            return;
        }
        let id = which.node[block as usize].expect("a block that nobody holds is cached");
        which.cached -= 1;
        let node = &self.nodes[id as usize];
        match pool {
            BlockPool::Full => self.full_order.remove(&node.full_key(id)),
            BlockPool::Sliding => self.sliding_order.remove(&node.sliding_key(id)),
        };
    }

    fn let_go(&mut self, pool: BlockPool, block: u32) {
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

    /// Frees the full block that goes first, and its node with it.
    fn evict_full(&mut self) {
        let (.., id) = *self.full_order.first().expect("the caller has seen that there is room");
        self.unregister(id);
        if let Some(parent) = self.nodes[id as usize].behind.parent() {
            let node = &mut self.nodes[parent as usize];
            node.children -= 1;
            if node.children == 0 && self.full.holders[node.full as usize] == 0 {
                self.full_order.insert(node.full_key(parent));
            }
        }
    }

    fn evict_sliding(&mut self) {
        let (.., id) = self.sliding_order.pop_first().expect("the caller has seen that there is room");
        let node = &mut self.nodes[id as usize];
        self.sliding.unregister(node.sliding.take().expect("what is listed has a block"));
        node.turn = 0;
    }

    /// Panics unless every block is free, cached or held as often as `tables` name it, and the cache hangs together.
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
            assert!(table.nodes.len() <= table.full.len(), "more is registered than there is");
            assert!(table.nodes.is_empty() || !table.forgotten, "what was forgotten is registered");
            for (index, id) in table.nodes.iter().enumerate() {
                let node = &self.nodes[*id as usize];
                assert_eq!(node.full, table.full[index], "block {index} is not the registered one");
                let before = index.checked_sub(1).map(|i| Behind::Node(table.nodes[i]));
                let expected = before.unwrap_or_else(|| Behind::Nothing(table.salt.clone()));
                assert_eq!(node.behind, expected, "what block {index} stands behind");
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
                        assert!(registered, "block {block} is lost");
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
            if let Some(parent) = node.behind.parent() {
                children[parent as usize] += 1;
                let parent = &self.nodes[parent as usize];
                assert!(parent.priority <= node.priority, "what is kept builds on what goes first");
                assert!(
                    !held || self.full.holders[parent.full as usize] > 0,
                    "a block is held, and the one before is not"
                );
            }
            if !held && node.children == 0 {
                leaves += 1;
                assert!(
                    self.full_order.contains(&node.full_key(id)),
                    "a full block that can go is not listed"
                );
            }
            if let Some(block) = node.sliding {
                assert_eq!(self.sliding.node[block as usize], Some(id), "a node's sliding block");
                if self.sliding.holders[block as usize] == 0 {
                    windows += 1;
                    assert!(
                        self.sliding_order.contains(&node.sliding_key(id)),
                        "a sliding block that can go is not listed"
                    );
                }
            }
        }
        assert_eq!(
            (leaves, windows),
            (self.full_order.len(), self.sliding_order.len()),
            "blocks that can go"
        );
        assert_eq!(self.by_chain.len() + self.unused_nodes.len(), self.nodes.len(), "nodes");
        for &id in self.by_chain.values() {
            assert_eq!(self.nodes[id as usize].children, children[id as usize], "children of node {id}");
        }
    }
}

/// Another chain has the same hash.
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
    fn salts_whose_texts_have_one_hash_share_nothing() {
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
            [&one, &other].map(|salt| blocks.chain(&Behind::Nothing(salt.clone()), &text[..SIZE]));
        blocks.by_chain.insert(forged, blocks.by_chain[&first]);
        assert_eq!([compute(&mut blocks, &other), compute(&mut blocks, &other)], [0, 0]);
        assert_eq!(compute(&mut blocks, &one), 4);
    }

    /// A text that somebody computes.
    struct Text {
        tokens: Vec<u32>,
        computed: usize,
        salt: usize,
        table: BlockTable,
    }

    /// What a block holds: the text up to its end, its salt, and a number for its beginning, each time that one is computed.
    #[derive(Debug, Clone)]
    struct Content {
        text: Vec<u32>,
        salt: usize,
        beginning: usize,
    }

    /// What the blocks hold, by pool and block.
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

        /// Panics unless the blocks of a text are its own, or of one that begins alike under its salt.
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

    /// Few tokens and few blocks, so that texts begin alike, part, and lose what they had.
    #[test]
    fn blocks_hold_the_text_and_the_salt_of_whoever_finds_them_and_nothing_forgotten() {
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
                            assert!(!forgotten.contains(&contents.beginning(&table)), "it was forgotten");
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
        println!("{hits} found, {forks} forks, {dropped} forgotten that others would have found");
        assert!(hits > 500 && forks > 500 && dropped > 100, "the test tests too little");
    }
}
