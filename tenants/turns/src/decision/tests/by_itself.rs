//! Jobs that take no turns, and share a GPU by what they allocate and when they are idle, on a virtual clock.

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::clock::{GPU_BYTES, gpu, name};
use crate::decision::history::History;
use crate::decision::quanta::COST_FACTOR;
use crate::decision::scene::{Cost, Held, Scene, Standing, Waiting, Wish};
use crate::decision::{Decision, Verdict, decide, idle_after_us};
use tenants::identity::TenantName;

const SECOND: u64 = 1_000_000;

/// One job: it does without the GPU for a while, allocates `more` in addition to its `base`, works, and frees that.
#[derive(Clone, Copy, Debug)]
struct Job {
    base: u64,
    more: u64,
    cost: Cost,
    work_us: u64,
    think_us: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Doing {
    Thinks {
        since_us: u64,
    },
    /// A thread waits for memory.
    Lacks {
        since_us: u64,
    },
    Works {
        left_us: u64,
    },
}

#[derive(Clone, Debug)]
struct Tenant {
    job: Job,
    doing: Doing,
    is_active: bool,
    rounds: u64,
}

impl Tenant {
    fn bytes(&self) -> u64 {
        let more = if matches!(self.doing, Doing::Works { .. }) { self.job.more } else { 0 };
        self.job.base + more
    }

    fn idle_since_us(&self) -> Option<u64> {
        match self.doing {
            Doing::Thinks { since_us } | Doing::Lacks { since_us } => Some(since_us),
            Doing::Works { .. } => None,
        }
    }
}

struct World {
    tenants: Vec<Tenant>,
    /// Those that wait, in order, and whether each waits for memory.
    claims: Vec<(usize, bool)>,
    history: History,
    now_us: u64,
    switching_us: u64,
    idle_before_us: u64,
    displaced: u64,
}

impl World {
    /// As many run at first as fit.
    fn new(jobs: &[Job]) -> Self {
        let mut free_bytes = GPU_BYTES;
        let mut history = History::default();
        let mut tenants = Vec::new();
        for (index, job) in jobs.iter().enumerate() {
            let is_active = job.base <= free_bytes;
            if is_active {
                free_bytes -= job.base;
            } else {
                history.left(&Self::name(index), &Scene::default(), 1);
            }
            let doing = Doing::Thinks { since_us: 1 };
            tenants.push(Tenant { job: *job, doing, is_active, rounds: 0 });
        }
        Self {
            tenants,
            claims: Vec::new(),
            history,
            now_us: 1,
            switching_us: 0,
            idle_before_us: 0,
            displaced: 0,
        }
    }

    fn name(index: usize) -> TenantName {
        name(&format!("t{index}"))
    }

    fn standing(&self, index: usize) -> Standing {
        let tenant = &self.tenants[index];
        let bytes = tenant.bytes();
        let held = if tenant.is_active {
            Held { copied_bytes: bytes, ..Held::default() }
        } else {
            Held { away_bytes: bytes, ..Held::default() }
        };
        Standing {
            is_active: tenant.is_active,
            comes_back: true,
            held: BTreeMap::from([(gpu(0), held)]),
            idle_since_us: tenant.idle_since_us(),
            cost: tenant.job.cost,
            ..Standing::default()
        }
    }

    fn scene(&self) -> Scene {
        let used: u64 = self.tenants.iter().filter(|one| one.is_active).map(Tenant::bytes).sum();
        let free_bytes = GPU_BYTES.checked_sub(used).expect("the GPU holds what it has");
        let waiting = self.claims.iter().map(|(index, is_memory)| {
            let more = BTreeMap::from([(gpu(0), self.tenants[*index].job.more)]);
            let wish = if *is_memory { Wish::Memory(more) } else { Wish::Back };
            Waiting { tenant: Self::name(*index), wish }
        });
        let tenants = 0..self.tenants.len();
        Scene {
            free_bytes: BTreeMap::from([(gpu(0), free_bytes)]),
            waiting: waiting.collect(),
            tenants: tenants.map(|index| (Self::name(index), self.standing(index))).collect(),
            ..Scene::default()
        }
    }

    fn pass(&mut self, us: u64) {
        self.now_us += us;
        for tenant in self.tenants.iter_mut().filter(|tenant| tenant.is_active) {
            if let Doing::Works { left_us } = &mut tenant.doing {
                *left_us = left_us.saturating_sub(us);
            }
        }
    }

    /// Ends the work that is done, and makes the claims of those that want something.
    fn turn_over(&mut self) {
        for index in 0..self.tenants.len() {
            let now_us = self.now_us;
            let tenant = &mut self.tenants[index];
            match tenant.doing {
                Doing::Works { left_us: 0 } if tenant.is_active => {
                    tenant.doing = Doing::Thinks { since_us: now_us };
                    tenant.rounds += 1;
                }
                Doing::Thinks { since_us } if since_us + tenant.job.think_us <= now_us => {
                    tenant.doing = Doing::Lacks { since_us: now_us };
                    self.claims.push((index, true));
                }
                Doing::Works { .. }
                    if !tenant.is_active && !self.claims.contains(&(index, false)) =>
                {
                    self.claims.push((index, false));
                }
                Doing::Works { .. } | Doing::Thinks { .. } | Doing::Lacks { .. } => {}
            }
        }
    }

    fn go(&mut self, scene: &Scene, decision: &Decision, claim: usize) {
        let Verdict::Go(victims) = &decision.verdict else { return };
        let (index, is_memory) = self.claims[claim];
        for name in victims {
            let victim = (0..self.tenants.len()).find(|index| Self::name(*index) == *name).unwrap();
            let standing = &scene.tenants[name];
            let cost_us = standing.cost.both_us();
            let idle_us = standing.idle_since_us.map_or(0, |since_us| self.now_us - since_us);
            // Either it was idle for as long as its switching takes, or it ran ten times as long.
            let came_us = self.history.of(name).came_us;
            let ran_us = came_us.map_or(u64::MAX, |came_us| self.now_us - came_us);
            if idle_us >= idle_after_us(standing, false) {
                self.idle_before_us += idle_us;
            } else {
                assert!(ran_us >= cost_us * COST_FACTOR, "{ran_us} {decision:?}");
            }
            self.tenants[victim].is_active = false;
            self.displaced += 1;
            self.switching_us += cost_us;
            self.pass(standing.cost.pause_us);
            self.history.left(name, scene, self.now_us);
        }
        let own = Self::name(index);
        if !self.tenants[index].is_active {
            self.pass(self.tenants[index].job.cost.resume_us);
            self.tenants[index].is_active = true;
            self.history.came(&own, self.now_us);
        } else if !victims.is_empty() {
            self.history.got_more(&own, scene, self.now_us);
        }
        if is_memory {
            let left_us = self.tenants[index].job.work_us;
            self.tenants[index].doing = Doing::Works { left_us };
        }
        self.claims.remove(claim);
    }

    fn run(&mut self, end_us: u64) {
        let mut steps = 0_u64;
        while self.now_us < end_us {
            steps += 1;
            assert!(steps < 200_000, "time stands still at {}", self.now_us);
            self.turn_over();
            let scene = self.scene();
            let decisions = decide(&scene, &self.history, self.now_us);
            let goes = |decision: &Decision| matches!(decision.verdict, Verdict::Go(_));
            if let Some(claim) = decisions.iter().position(goes) {
                self.go(&scene, &decisions[claim], claim);
                continue;
            }
            let told = decisions.iter().filter_map(|decision| match decision.verdict {
                Verdict::Wait(until_us) => until_us,
                Verdict::Never | Verdict::Sink(_) => panic!("{decision:?}"),
                Verdict::Go(_) => None,
            });
            let ends = self.tenants.iter().filter_map(|tenant| match tenant.doing {
                Doing::Works { left_us } => tenant.is_active.then_some(self.now_us + left_us),
                Doing::Thinks { since_us } => Some(since_us + tenant.job.think_us),
                Doing::Lacks { .. } => None,
            });
            // Who waits looks each half second whether somebody has become idle.
            let look = (!self.claims.is_empty()).then_some(self.now_us + SECOND / 2);
            let next_us = told.chain(ends).chain(look).min().expect("somebody does something");
            assert!(next_us > self.now_us, "{decisions:?}");
            self.pass(next_us.min(end_us) - self.now_us);
        }
    }
}

fn jobs() -> impl Strategy<Value = Job> {
    let cost = (1_000..2 * SECOND, 1_000..2 * SECOND);
    (10..45_u64, 10..50_u64, cost, 1_000..20 * SECOND, 1..20 * SECOND).prop_map(
        |(base, more, (pause_us, resume_us), work_us, think_us)| Job {
            base,
            more,
            cost: Cost { pause_us, resume_us, is_measured: true },
            work_us,
            think_us,
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 32, ..ProptestConfig::default() })]

    /// Whatever jobs allocate, work and are idle for: all go on, none waits for ever, and switching takes no more than a tenth of the time besides what
    /// was idle before it.
    #[test]
    fn jobs_that_want_each_others_memory_all_go_on_and_lose_little(
        jobs in prop::collection::vec(jobs(), 2..6),
    ) {
        let mut world = World::new(&jobs);
        world.run(1200 * SECOND);
        prop_assert!(
            world.switching_us <= world.now_us / 10 * jobs.len() as u64 + world.idle_before_us,
            "{} of {}, {} idle", world.switching_us, world.now_us, world.idle_before_us
        );
        // All others' quanta, once before it and once for those that were there, and its own work in pieces of a quantum.
        for tenant in &world.tenants {
            prop_assert!(tenant.rounds >= 2, "{:?}", world.tenants);
        }
    }
}

#[test]
fn two_that_need_more_than_half_each_change_places_once_a_round_and_not_more() {
    let job = Job {
        base: 40,
        more: 40,
        cost: Cost { pause_us: SECOND / 2, resume_us: SECOND / 2, is_measured: true },
        work_us: 5 * SECOND,
        think_us: 1,
    };
    let mut world = World::new(&[job, job]);
    world.run(600 * SECOND);
    let rounds: Vec<_> = world.tenants.iter().map(|tenant| tenant.rounds).collect();
    assert!(rounds.iter().all(|rounds| *rounds >= 30), "{rounds:?}");
    assert!(world.displaced <= rounds.iter().sum::<u64>() + 2, "{} {rounds:?}", world.displaced);
    // Of six seconds a round, five are work and one is the switch, which was waited for as long as it takes.
    assert!(world.switching_us * 4 <= world.now_us, "{} of {}", world.switching_us, world.now_us);
}

#[test]
fn one_that_is_switched_in_no_time_keeps_its_gpu_for_as_long_as_those_that_wait_for_it_will() {
    let job = |base, more, [pause_us, resume_us, work_us, think_us]: [u64; 4]| Job {
        base,
        more,
        cost: Cost { pause_us, resume_us, is_measured: true },
        work_us,
        think_us,
    };
    let mut world = World::new(&[
        job(17, 37, [1_000, 1_000, 3 * SECOND / 2, 1]),
        job(37, 10, [952_019, 975_695, 18_512_870, 2_268_053]),
        job(13, 41, [1_009_105, 366_118, 9_441_156, 5_393_401]),
        job(40, 42, [1_780_814, 1_688_295, 5_807_398, 16_783_724]),
    ]);
    world.run(1200 * SECOND);
    let rounds: Vec<_> = world.tenants.iter().map(|tenant| tenant.rounds).collect();
    // Each round of the first is done in one turn, as those of the others are, and not in fifteen.
    assert!(rounds.iter().all(|one| *one >= 20), "{rounds:?}");
}
