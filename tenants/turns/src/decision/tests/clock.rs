//! Jobs that take turns on a virtual clock, by the decisions of the product.

use std::collections::BTreeMap;

use crate::decision::history::History;
use crate::decision::scene::{Cost, Held, Scene, Standing, Waiting, Wish};
use crate::decision::{Decision, Verdict, decide};
use tenants::class::{Class, Weight};
use tenants::identity::TenantName;

pub(super) const GPU_BYTES: u64 = 100;
/// Turns that are looked at in one run, unless more are requested.
const WENT_MAX: u64 = 300;

pub(super) fn name(text: &str) -> TenantName {
    TenantName::new(text).unwrap()
}

pub(super) fn gpu(index: usize) -> String {
    format!("GPU-{index}")
}

/// A job, and the work that it does again and again.
#[derive(Clone, Debug)]
pub(super) struct Job {
    pub(super) class: Class,
    pub(super) weight: Weight,
    pub(super) gpus: Vec<usize>,
    pub(super) bytes: u64,
    pub(super) cost: Cost,
    /// The time for which it works in one turn; none for one that never ends its turn.
    pub(super) work_us: Option<u64>,
    /// The time for which it does without the GPUs after a turn.
    pub(super) think_us: u64,
}

impl Job {
    pub(super) fn new(class: Class, gpus: &[usize], cost_us: u64) -> Self {
        Self {
            class,
            weight: Weight::default(),
            gpus: gpus.to_vec(),
            bytes: 80,
            cost: Cost { pause_us: cost_us / 2, resume_us: cost_us / 2, is_measured: true },
            work_us: None,
            think_us: 0,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Doing {
    Waits { since_us: u64, left_us: Option<u64> },
    InTurn { until_us: Option<u64>, since_us: u64 },
    Thinks { until_us: u64 },
}

/// The results of one job.
#[derive(Clone, Debug, Default)]
pub(super) struct Tally {
    pub(super) in_turn_us: u64,
    pub(super) longest_wait_us: u64,
    pub(super) turns: u64,
    pub(super) pushed_out: u64,
}

/// All of them, and the clock.
pub(super) struct World {
    pub(super) jobs: Vec<Job>,
    doing: Vec<Doing>,
    active: Vec<bool>,
    /// The order of those that wait.
    queue: Vec<usize>,
    pub(super) history: History,
    pub(super) now_us: u64,
    pub(super) tallies: Vec<Tally>,
    pub(super) switching_us: u64,
    pub(super) grew: Vec<String>,
    gpus: usize,
    pub(super) went_max: u64,
}

impl World {
    /// All jobs are paused, and want their GPUs together.
    pub(super) fn new(jobs: Vec<Job>) -> Self {
        let gpus = jobs.iter().flat_map(|job| &job.gpus).max().map_or(0, |most| most + 1);
        let count = jobs.len();
        Self {
            doing: jobs
                .iter()
                .map(|job| Doing::Waits { since_us: 1, left_us: job.work_us })
                .collect(),
            jobs,
            active: vec![false; count],
            queue: (0..count).collect(),
            history: History::default(),
            now_us: 1,
            tallies: vec![Tally::default(); count],
            switching_us: 0,
            grew: Vec::new(),
            gpus,
            went_max: WENT_MAX,
        }
    }

    pub(super) fn tenant(index: usize) -> TenantName {
        name(&format!("t{index}"))
    }

    fn index(tenant: &TenantName) -> usize {
        tenant.as_str()[1..].parse().unwrap()
    }

    pub(super) fn scene(&self) -> Scene {
        let mut free_bytes: BTreeMap<String, u64> =
            (0..self.gpus).map(|index| (gpu(index), GPU_BYTES)).collect();
        let mut tenants = BTreeMap::new();
        for (index, job) in self.jobs.iter().enumerate() {
            let is_active = self.active[index];
            let held = if is_active {
                Held { copied_bytes: job.bytes, ..Held::default() }
            } else {
                Held { away_bytes: job.bytes, ..Held::default() }
            };
            for at in job.gpus.iter().filter(|_| is_active) {
                let free = free_bytes.get_mut(&gpu(*at)).unwrap();
                *free = free.checked_sub(job.bytes).expect("no GPU holds more than it has");
            }
            let standing = Standing {
                class: job.class,
                weight: job.weight,
                is_active,
                held: job.gpus.iter().map(|at| (gpu(*at), held)).collect(),
                has_turn: matches!(self.doing[index], Doing::InTurn { .. }),
                comes_back: true,
                idle_since_us: None,
                cost: job.cost,
                ..Standing::default()
            };
            tenants.insert(Self::tenant(index), standing);
        }
        let waiting = self
            .queue
            .iter()
            .map(|index| Waiting { tenant: Self::tenant(*index), wish: Wish::Turn })
            .collect();
        Scene { free_bytes, tenants, waiting, ..Scene::default() }
    }

    /// Runs until `end_us`, or until so many turns have begun that more would say the same; how many those are.
    pub(super) fn run(&mut self, end_us: u64) -> u64 {
        let mut went = 0;
        let mut steps = 0_u64;
        while self.now_us < end_us && went < self.went_max {
            steps += 1;
            assert!(steps < 2_000_000, "time stands still at {}", self.now_us);
            self.end_what_is_over();
            let scene = self.scene();
            let decisions = decide(&scene, &self.history, self.now_us);
            let goes = |decision: &&Decision| matches!(decision.verdict, Verdict::Go(_));
            if let Some(decision) = decisions.iter().find(goes) {
                self.go(&scene, decision);
                went += 1;
                continue;
            }
            let told = decisions.iter().filter_map(|decision| match decision.verdict {
                Verdict::Wait(until_us) => until_us,
                Verdict::Never | Verdict::Sink(_) => panic!("{decision:?}"),
                Verdict::Go(_) => None,
            });
            let ends = self.doing.iter().filter_map(|doing| match doing {
                Doing::InTurn { until_us, .. } => *until_us,
                Doing::Thinks { until_us } => Some(*until_us),
                Doing::Waits { .. } => None,
            });
            let Some(next_us) = told.chain(ends).min() else {
                let waits_well = |index: &usize| self.waits_for_a_higher_class(*index);
                assert!(
                    self.queue.iter().all(waits_well),
                    "they wait for each other: {decisions:?}"
                );
                break;
            };
            assert!(next_us > self.now_us, "{decisions:?}");
            self.now_us = next_us.min(end_us);
        }
        self.account();
        went
    }

    /// Does a job of a higher class never end its turn on a GPU that this one needs?
    fn waits_for_a_higher_class(&self, index: usize) -> bool {
        let own = &self.jobs[index];
        let mut others = self.jobs.iter().zip(&self.doing);
        others.any(|(job, doing)| {
            matches!(doing, Doing::InTurn { until_us: None, .. })
                && job.class > own.class
                && job.gpus.iter().any(|gpu| own.gpus.contains(gpu))
        })
    }

    fn account(&mut self) {
        for (doing, tally) in self.doing.iter().zip(&mut self.tallies) {
            match doing {
                Doing::Waits { since_us, .. } => {
                    let waited_us = self.now_us - since_us;
                    tally.longest_wait_us = tally.longest_wait_us.max(waited_us);
                }
                Doing::InTurn { since_us, .. } => tally.in_turn_us += self.now_us - since_us,
                Doing::Thinks { .. } => {}
            }
        }
    }

    fn end_what_is_over(&mut self) {
        for index in 0..self.jobs.len() {
            match self.doing[index] {
                Doing::InTurn { until_us: Some(until_us), since_us } if until_us <= self.now_us => {
                    self.tallies[index].in_turn_us += self.now_us - since_us;
                    let until_us = self.now_us + self.jobs[index].think_us;
                    self.doing[index] = Doing::Thinks { until_us };
                }
                Doing::Thinks { until_us } if until_us <= self.now_us => {
                    let left_us = self.jobs[index].work_us;
                    self.doing[index] = Doing::Waits { since_us: self.now_us, left_us };
                    self.queue.push(index);
                }
                Doing::InTurn { .. } | Doing::Thinks { .. } | Doing::Waits { .. } => {}
            }
        }
    }

    fn go(&mut self, scene: &Scene, decision: &Decision) {
        let Verdict::Go(victims) = &decision.verdict else { return };
        let index = Self::index(&decision.tenant);
        for tenant in victims {
            let victim = Self::index(tenant);
            assert!(self.active[victim], "{decision:?}");
            self.active[victim] = false;
            self.pass(self.jobs[victim].cost.pause_us);
            let grew = self.history.left(tenant, scene, self.now_us);
            self.grew.extend(grew);
            if let Doing::InTurn { until_us, since_us } = self.doing[victim] {
                self.tallies[victim].in_turn_us += self.now_us - since_us;
                self.tallies[victim].pushed_out += 1;
                let left_us = until_us.map(|until_us| until_us.saturating_sub(self.now_us).max(1));
                self.doing[victim] = Doing::Waits { since_us: self.now_us, left_us };
                self.queue.push(victim);
            }
        }
        if !self.active[index] {
            self.pass(self.jobs[index].cost.resume_us);
            self.active[index] = true;
            self.history.came(&decision.tenant, self.now_us);
        }
        self.history.began_turn(&decision.tenant, false, self.now_us);
        self.queue.retain(|waits| *waits != index);
        let Doing::Waits { since_us, left_us } = self.doing[index] else {
            panic!("{decision:?}");
        };
        let tally = &mut self.tallies[index];
        tally.longest_wait_us = tally.longest_wait_us.max(self.now_us - since_us);
        tally.turns += 1;
        let until_us = left_us.map(|left_us| self.now_us + left_us);
        self.doing[index] = Doing::InTurn { until_us, since_us: self.now_us };
    }

    fn pass(&mut self, us: u64) {
        self.now_us += us;
        self.switching_us += us;
    }
}
