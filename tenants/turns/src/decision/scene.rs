//! The state of tenants and GPUs at one moment, and the processes that wait.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use tenants::class::{Class, Weight};
use tenants::coordinator::ProcessBytes;
use tenants::identity::TenantName;

/// Tenants, GPUs, and the processes that wait.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Scene {
    /// Free bytes of each GPU, by its machine-wide name. A GPU without an entry counts as full.
    pub free_bytes: BTreeMap<String, u64>,
    /// Total bytes of each GPU, if they are known.
    pub total_bytes: BTreeMap<String, u64>,
    /// All tenants that have a process.
    pub tenants: BTreeMap<TenantName, Standing>,
    /// Tenants of which at least one process does not answer now. The memory that they hold is not known.
    pub unheard: BTreeSet<TenantName>,
    /// Tenants that are being paused or resumed. Soon their memory is free, or a pause can free it.
    pub moving: BTreeSet<TenantName>,
    /// Tenants whose resume failed for lack of memory, although the figures say that they fit.
    pub short: BTreeSet<TenantName>,
    /// The processes that wait, in the order in which they came. A tenant has one entry for each of its waiting processes.
    pub waiting: Vec<Waiting>,
}

/// One tenant.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Standing {
    /// Its rank among the tenants.
    pub class: Class,
    /// The number of quanta that it has at a time.
    pub weight: Weight,
    /// Does it run? A paused tenant holds only the memory that a pause leaves in place.
    pub is_active: bool,
    /// Its memory, by GPU.
    pub held: BTreeMap<String, Held>,
    /// The memory of each of its processes, on a GPU or off it, by GPU.
    pub processes: BTreeMap<String, Vec<ProcessBytes>>,
    /// Is one of its processes in a turn?
    pub has_turn: bool,
    /// Is it resumed automatically after a pause for another tenant? If not, only orders and turns may pause it.
    pub comes_back: bool,
    /// The time since which it has launched nothing and its streams are empty, if known, in microseconds of the clock.
    pub idle_since_us: Option<u64>,
    /// The time that a switch of it takes.
    pub cost: Cost,
    /// The contexts of its processes, which a pause of memory alone leaves on its GPUs.
    pub contexts: Contexts,
}

/// The most bytes of a GPU that the contexts of one process may use.
pub(super) const CONTEXT_BYTES: u64 = 1 << 30;

/// The contexts of one tenant.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Contexts {
    /// The number of its processes that have contexts.
    pub processes: u64,
    /// May the contexts leave in turns, and are they on the GPUs?
    pub may_leave: bool,
    /// Has a deep pause removed some of them?
    pub are_away: bool,
}

/// Memory of one tenant on one GPU, in bytes, by what a pause does with it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Held {
    /// Blocks that the application caches and does not use.
    pub cached_bytes: u64,
    /// Memory whose contents a pause discards: after the resume they are undefined.
    pub discarded_bytes: u64,
    /// Memory whose contents host memory still has from before.
    pub unchanged_bytes: u64,
    /// Memory whose contents a pause must copy.
    pub copied_bytes: u64,
    /// Memory that is not on the GPU now. A resume of the whole tenant needs it.
    pub away_bytes: u64,
}

impl Held {
    /// Returns the bytes that a pause frees.
    pub fn given_bytes(self) -> u64 {
        let kept = self.unchanged_bytes.saturating_add(self.copied_bytes);
        self.cached_bytes.saturating_add(self.discarded_bytes).saturating_add(kept)
    }
}

/// The times of a tenant's last pause and resume, measured or guessed, in microseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cost {
    /// The time of the pause.
    pub pause_us: u64,
    /// The time of the resume.
    pub resume_us: u64,
    /// Are the times measured? Before the first pause they are a guess, by the tenant's bytes.
    pub is_measured: bool,
}

impl Cost {
    /// Returns the time of a pause and a resume together.
    pub fn both_us(self) -> u64 {
        self.pause_us.saturating_add(self.resume_us)
    }
}

/// A process that waits for its tenant to get its GPUs, or more memory there.
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
    /// A person's order. It goes before all others. Only a tenant that is in a turn holds it up.
    Order,
    /// A turn.
    #[default]
    Turn,
    /// A resume, in its place among the others.
    Resume,
    /// The resume of a tenant that was paused for another.
    Back,
    /// The bytes that an allocation did not get, by GPU.
    Memory(BTreeMap<String, u64>),
    /// A context on this GPU. Its size is not known before.
    Context(String),
}

impl Wish {
    /// Is it a person's order?
    pub fn is_order(&self) -> bool {
        *self == Self::Order
    }

    /// Does it pause only tenants that are resumed automatically? It does if it is no order, turn or resume.
    pub fn spares_others(&self) -> bool {
        match self {
            Self::Back | Self::Memory(_) | Self::Context(_) => true,
            Self::Order | Self::Turn | Self::Resume => false,
        }
    }

    /// Returns the bytes that it needs in addition to the tenant's own memory, by GPU.
    pub fn bytes(&self) -> impl Iterator<Item = (&str, u64)> {
        let bytes = if let Self::Memory(bytes) = self { Some(bytes) } else { None };
        bytes.into_iter().flatten().map(|(gpu, bytes)| (gpu.as_str(), *bytes))
    }

    /// Returns the GPU on which it wants a context.
    pub fn context(&self) -> Option<&str> {
        if let Self::Context(gpu) = self { Some(gpu) } else { None }
    }

    /// Returns its name, one word.
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
    /// Returns the GPUs that it is about: all of its tenant's. If the tenant runs and wants more memory, only those with more.
    pub fn gpus<'a>(&'a self, standing: &'a Standing) -> impl Iterator<Item = &'a str> {
        let more = || self.wish.bytes().map(|(gpu, _)| gpu).chain(self.wish.context());
        let only_more = standing.is_active && more().next().is_some();
        let own = standing.gpus().filter(move |_| !only_more);
        own.chain(more())
    }
}

impl Standing {
    /// Returns the GPUs on which it has memory, or had some before its pause.
    pub fn gpus(&self) -> impl Iterator<Item = &str> {
        let has = |held: &Held| held.away_bytes > 0 || held.given_bytes() > 0;
        self.held.iter().filter(move |(_, held)| has(held)).map(|(gpu, _)| gpu.as_str())
    }

    /// Returns the bytes that a pause copies, on all GPUs.
    pub fn copied_bytes(&self) -> u64 {
        self.held.values().fold(0, |all, held| all.saturating_add(held.copied_bytes))
    }

    /// Returns the bytes that it needs on each GPU to run, and those that `wish` adds.
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

    /// Returns the bytes that its contexts may use on each of its GPUs after a resume.
    pub(super) fn margin_bytes(&self) -> u64 {
        let Contexts { processes, are_away, .. } = self.contexts;
        if are_away { processes.saturating_mul(CONTEXT_BYTES) } else { 0 }
    }

    /// Returns the bytes that a pause frees on this GPU.
    pub fn given_bytes(&self, gpu: &str) -> u64 {
        self.held.get(gpu).map_or(0, |held| held.given_bytes())
    }
}
