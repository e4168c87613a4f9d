//! What is so at one moment.

use std::collections::BTreeMap;

use super::{Class, Weight};
use crate::identity::TenantName;

/// Tenants, GPUs, and who waits.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Scene {
    /// Free bytes of each GPU, by its machine-wide name. One that is not here is as if it were full.
    pub free_bytes: BTreeMap<String, u64>,
    /// All tenants that have a process.
    pub tenants: BTreeMap<TenantName, Standing>,
    /// Who waits, in the order in which they came. A tenant that waits in several processes is here as often.
    pub waiting: Vec<Waiting>,
}

/// One tenant.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Standing {
    /// What it is to the others.
    pub class: Class,
    /// How many quanta it has at a time.
    pub weight: Weight,
    /// Does it run? One that is paused holds nothing but what a pause leaves in place.
    pub is_active: bool,
    /// Its memory, by GPU.
    pub held: BTreeMap<String, Held>,
    /// Is a process of it in its turn?
    pub has_turn: bool,
    /// Since when it has launched nothing and its streams are empty, where that is known, in microseconds of the clock.
    pub idle_since_us: Option<u64>,
    /// What switching it takes.
    pub cost: Cost,
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
    /// What a pause gives back.
    pub fn given_bytes(self) -> u64 {
        let kept = self.unchanged_bytes.saturating_add(self.copied_bytes);
        self.cached_bytes.saturating_add(self.discarded_bytes).saturating_add(kept)
    }
}

/// What a tenant's last pause and resume took, or would, in microseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cost {
    /// To leave.
    pub pause_us: u64,
    /// To come back.
    pub resume_us: u64,
}

impl Cost {
    /// Both ways.
    pub fn both_us(self) -> u64 {
        self.pause_us.saturating_add(self.resume_us)
    }
}

/// One who waits for its tenant to have its GPUs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Waiting {
    /// The tenant.
    pub tenant: TenantName,
    /// A person's order: it goes before all others, and only a turn that somebody is in holds it up.
    pub is_order: bool,
}

impl Standing {
    /// The GPUs that it has memory on, or had.
    pub fn gpus(&self) -> impl Iterator<Item = &str> {
        let has = |held: &Held| held.away_bytes > 0 || held.given_bytes() > 0;
        self.held.iter().filter(move |(_, held)| has(held)).map(|(gpu, _)| gpu.as_str())
    }

    /// What a pause copies, on all GPUs.
    pub fn copied_bytes(&self) -> u64 {
        self.held.values().fold(0, |all, held| all.saturating_add(held.copied_bytes))
    }

    /// What a pause gives back on this GPU.
    pub fn given_bytes(&self, gpu: &str) -> u64 {
        self.held.get(gpu).map_or(0, |held| held.given_bytes())
    }
}
