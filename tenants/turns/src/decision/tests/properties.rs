//! Properties that hold whatever the jobs are.

use proptest::prelude::*;

use super::clock::{Job, World};
use crate::decision::quanta::BOUND_US;
use crate::decision::scene::Cost;
use tenants::class::{Class, Weight};

const SECOND: u64 = 1_000_000;

fn costs() -> impl Strategy<Value = Cost> {
    (1_000..2 * SECOND, 1_000..2 * SECOND).prop_map(|(pause_us, resume_us)| Cost {
        pause_us,
        resume_us,
        is_measured: true,
    })
}

fn weights() -> impl Strategy<Value = Weight> {
    (1..4_u32).prop_map(|weight| weight.to_string().parse().unwrap())
}

fn classes() -> impl Strategy<Value = Class> {
    prop_oneof![Just(Class::Background), Just(Class::Fair), Just(Class::Guaranteed)]
}

/// A job of one of the classes, on some of three GPUs, that works and thinks for a while, or never ends its turn.
fn any_job() -> impl Strategy<Value = Job> {
    let gpus = prop::sample::subsequence(vec![0_usize, 1, 2], 1..=3);
    let work = prop::option::of(1_000..30 * SECOND);
    (classes(), weights(), gpus, costs(), work, 0..10 * SECOND).prop_map(
        |(class, weight, gpus, cost, work_us, think_us)| Job {
            class,
            weight,
            gpus,
            bytes: 80,
            cost,
            work_us,
            think_us,
        },
    )
}

fn fair_job(is_endless: bool) -> impl Strategy<Value = Job> {
    any_job().prop_map(move |job| Job {
        class: Class::Fair,
        work_us: if is_endless { None } else { job.work_us },
        ..job
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    /// Everybody always wants one GPU: less than a tenth of the time goes into switching, everybody has a share by its weight, and
    /// nobody is pushed out before its time.
    #[test]
    fn who_always_wants_the_gpu_loses_less_than_a_tenth_by_switching(
        jobs in prop::collection::vec(fair_job(true), 2..5),
    ) {
        let jobs: Vec<_> = jobs.into_iter().map(|job| Job { gpus: vec![0], ..job }).collect();
        let mut world = World::new(jobs);
        let hour_us = 3600 * SECOND;
        world.run(hour_us);
        prop_assert!(world.switching_us * 10 < world.now_us, "{} of {}", world.switching_us, world.now_us);
        prop_assert_eq!(&world.grew, &Vec::<String>::new());
        for (job, tally) in world.jobs.iter().zip(&world.tallies) {
            prop_assert!(tally.turns >= 2, "{:?}: {:?}", job, world.tallies);
        }
        for (one, tally) in world.jobs.iter().zip(&world.tallies) {
            let quantum_us = (one.cost.both_us() * 10).max(100_000) * one.weight.get();
            prop_assert!(tally.in_turn_us + one.cost.pause_us >= quantum_us * (tally.turns - 1), "{:?}", tally);
        }
    }

    /// Whatever the classes and the GPUs: nobody stops for ever, and no fair job waits longer than all others' quanta and turns.
    #[test]
    fn nobody_with_a_weight_waits_for_ever(
        jobs in prop::collection::vec(fair_job(false), 2..6),
    ) {
        let mut world = World::new(jobs);
        world.run(2 * 3600 * SECOND);
        // Each of the others goes before it at most twice: those that came before, and one that is there.
        let longest_us: u64 = world.jobs.iter().map(|job| {
            let quantum_us = (job.cost.both_us() * 10).max(100_000) * job.weight.get();
            2 * (quantum_us + 2 * job.cost.both_us())
        }).sum();
        for tally in &world.tallies {
            prop_assert!(tally.turns > 0 && tally.longest_wait_us <= longest_us, "{:?} of {}", world.tallies, longest_us);
        }
    }

    /// A guaranteed job waits for those of lower classes no longer than the bound and the switch.
    #[test]
    fn a_guaranteed_job_never_waits_for_others_longer_than_its_bound(
        one in any_job(),
        others in prop::collection::vec(any_job(), 1..5),
    ) {
        let one = Job { class: Class::Guaranteed, work_us: one.work_us.or(Some(SECOND)), ..one };
        let lower = |job: Job| Job {
            class: if job.class == Class::Guaranteed { Class::Background } else { job.class },
            ..job
        };
        let others: Vec<_> = others.into_iter().map(lower).collect();
        // The switch to it, and one that was under way.
        let switches_us: u64 = others.iter().map(|job| job.cost.both_us()).sum::<u64>() * 2
            + one.cost.both_us();
        let mut world = World::new([vec![one], others].concat());
        world.run(600 * SECOND);
        let waited_us = world.tallies[0].longest_wait_us;
        prop_assert!(waited_us <= BOUND_US + switches_us, "{waited_us}");
        prop_assert!(world.tallies[0].turns > 1);
    }

    /// Any jobs on any GPUs: no two wait for each other (the clock of the test fails then), and the GPUs hold what they have.
    #[test]
    fn any_gangs_make_progress(jobs in prop::collection::vec(any_job(), 2..6)) {
        let mut world = World::new(jobs);
        prop_assert!(world.run(1200 * SECOND) > 0);
    }
}
