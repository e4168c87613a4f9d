//! The state of tenants and GPUs at one moment, and those that wait.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use tenants::class::{Class, Weight};
use tenants::coordinator::ProcessBytes;
use tenants::identity::TenantName;

/// Tenants, GPUs, and who waits.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Scene {
    /// Free bytes of each GPU, by its machine-wide name. One that is not here is as if it were full.
    pub free_bytes: BTreeMap<String, u64>,
    /// All bytes of each GPU, where that is known.
    pub total_bytes: BTreeMap<String, u64>,
    /// All tenants that have a process.
    pub tenants: BTreeMap<TenantName, Standing>,
    /// Tenants with processes that do not answer for now, wholly or in part: what they hold is not known.
    pub unheard: BTreeSet<TenantName>,
    /// Tenants that are being paused or resumed: what they hold is free in a moment, or theirs to give.
    pub moving: BTreeSet<TenantName>,
    /// Tenants that did not come for want of memory, though they fit by all figures.
    pub short: BTreeSet<TenantName>,
    /// Those that wait, in the order in which they came. A tenant that waits in several processes is here as often.
    pub waiting: Vec<Waiting>,
}

/// One tenant.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Standing {
    /// Its rank among the others.
    pub class: Class,
    /// The number of quanta that it has at a time.
    pub weight: Weight,
    /// Does it run? One that is paused holds nothing but what a pause leaves in place.
    pub is_active: bool,
    /// Its memory, by GPU.
    pub held: BTreeMap<String, Held>,
    /// The memory of its processes, on a GPU or off it, by GPU.
    pub processes: BTreeMap<String, Vec<ProcessBytes>>,
    /// Is a process of it in its turn?
    pub has_turn: bool,
    /// Does it come back by itself when it was paused for another? Who does not is paused by order, or for a turn, alone.
    pub comes_back: bool,
    /// Since when it has launched nothing and its streams are empty, where that is known, in microseconds of the clock.
    pub idle_since_us: Option<u64>,
    /// The time that switching it takes.
    pub cost: Cost,
    /// The contexts of its processes, which a pause of memory alone leaves on its GPUs.
    pub contexts: Contexts,
}

/// The bytes that the contexts of one process may take of a GPU.
pub(super) const CONTEXT_BYTES: u64 = 1 << 30;

/// The contexts of one tenant.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Contexts {
    /// The number of processes that have some.
    pub processes: u64,
    /// May they leave in turns, and are they there?
    pub may_leave: bool,
    /// Are some away, by a deep pause?
    pub are_away: bool,
}

/// Memory of one tenant on one GPU, in bytes, by what a pause does with it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Held {
    /// Blocks that the application caches and does not use.
    pub cached_bytes: u64,
    /// Given up: it comes back with undefined contents.
    pub discarded_bytes: u64,
    /// As host memory still has it.
    pub unchanged_bytes: u64,
    /// To be copied.
    pub copied_bytes: u64,
    /// Not there now; a resume of the whole tenant takes it.
    pub away_bytes: u64,
}

impl Held {
    /// Returns the bytes that a pause gives back.
    pub fn given_bytes(self) -> u64 {
        let kept = self.unchanged_bytes.saturating_add(self.copied_bytes);
        self.cached_bytes.saturating_add(self.discarded_bytes).saturating_add(kept)
    }
}

/// The times that a tenant's last pause and resume took, or would take, in microseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cost {
    /// To leave.
    pub pause_us: u64,
    /// To come back.
    pub resume_us: u64,
    /// Has it been paused before? Else the times are a guess, by its bytes.
    pub is_measured: bool,
}

impl Cost {
    /// Both ways.
    pub fn both_us(self) -> u64 {
        self.pause_us.saturating_add(self.resume_us)
    }
}

/// One who waits for its tenant to have its GPUs, or more memory there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Waiting {
    /// The tenant.
    pub tenant: TenantName,
    /// The aim of the wait.
    pub wish: Wish,
}

/// The aim of a wait.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Wish {
    /// A person's order: it goes before all others, and only a turn that somebody is in holds it up.
    Order,
    /// A turn.
    #[default]
    Turn,
    /// A resume, in its place among the others.
    Resume,
    /// To be back, after it was paused for another.
    Back,
    /// So many bytes more, by GPU, which an allocation did not get.
    Memory(BTreeMap<String, u64>),
    /// A context on this GPU. What it takes nobody knows before.
    Context(String),
}

impl Wish {
    /// Is it a person's order?
    pub fn is_order(&self) -> bool {
        *self == Self::Order
    }

    /// Do only those make way for it that come back by themselves? No command or call wants it.
    pub fn spares_others(&self) -> bool {
        match self {
            Self::Back | Self::Memory(_) | Self::Context(_) => true,
            Self::Order | Self::Turn | Self::Resume => false,
        }
    }

    /// Returns the bytes that it takes in addition to the tenant's own memory, by GPU.
    pub fn bytes(&self) -> impl Iterator<Item = (&str, u64)> {
        let bytes = if let Self::Memory(bytes) = self { Some(bytes) } else { None };
        bytes.into_iter().flatten().map(|(gpu, bytes)| (gpu.as_str(), *bytes))
    }

    /// The GPU that it wants a context on.
    pub fn context(&self) -> Option<&str> {
        if let Self::Context(gpu) = self { Some(gpu) } else { None }
    }

    /// In a word.
    pub fn label(&self) -> &'static str {
        match self {
            Self::Order => "order",
            Self::Turn => "turn",
            Self::Resume => "resume",
            Self::Back => "back",
            Self::Memory(_) => "memory",
            Self::Context(_) => "context",
        }
    }
}

impl Waiting {
    /// The GPUs that it is about: all of its tenant's, or where that runs, those that it wants more of.
    pub fn gpus<'a>(&'a self, standing: &'a Standing) -> impl Iterator<Item = &'a str> {
        let more = || self.wish.bytes().map(|(gpu, _)| gpu).chain(self.wish.context());
        let only_more = standing.is_active && more().next().is_some();
        let own = standing.gpus().filter(move |_| !only_more);
        own.chain(more())
    }
}

impl Standing {
    /// The GPUs that it has memory on, or had.
    pub fn gpus(&self) -> impl Iterator<Item = &str> {
        let has = |held: &Held| held.away_bytes > 0 || held.given_bytes() > 0;
        self.held.iter().filter(move |(_, held)| has(held)).map(|(gpu, _)| gpu.as_str())
    }

    /// Returns the bytes that a pause copies, on all GPUs.
    pub fn copied_bytes(&self) -> u64 {
        self.held.values().fold(0, |all, held| all.saturating_add(held.copied_bytes))
    }

    /// Returns the bytes that it takes on each GPU until it runs, with those that `wish` adds.
    pub fn lacks<'a>(&'a self, wish: &'a Wish) -> BTreeMap<&'a str, u64> {
        let away = self.held.iter().filter(|_| !self.is_active);
        let mut lacks: BTreeMap<&str, u64> =
            away.map(|(gpu, held)| (gpu.as_str(), held.away_bytes)).collect();
        for (gpu, bytes) in wish.bytes() {
            let all = lacks.entry(gpu).or_default();
            *all = all.saturating_add(bytes);
        }
        lacks
    }

    /// Returns the bytes that its contexts may take on each of its GPUs on its way back.
    pub(super) fn margin_bytes(&self) -> u64 {
        let Contexts { processes, are_away, .. } = self.contexts;
        if are_away { processes.saturating_mul(CONTEXT_BYTES) } else { 0 }
    }

    /// Returns the bytes that a pause gives back on this GPU.
    pub fn given_bytes(&self, gpu: &str) -> u64 {
        self.held.get(gpu).map_or(0, |held| held.given_bytes())
    }
}
