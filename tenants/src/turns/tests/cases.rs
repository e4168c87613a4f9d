//! Decisions one by one.

use std::collections::BTreeMap;

use super::clock::{GPU_BYTES, Job, World, gpu, name};
use crate::turns::history::History;
use crate::turns::scene::{Cost, Held, Scene, Standing, Waiting};
use crate::turns::{Class, Decision, Settings, Verdict, decide};

const SECOND: u64 = 1_000_000;
const NOW: u64 = 1_000 * SECOND;

fn active(class: Class, bytes: u64) -> Standing {
    let held = Held { copied_bytes: bytes, ..Held::default() };
    Standing {
        class,
        is_active: true,
        held: BTreeMap::from([(gpu(0), held)]),
        cost: Cost { pause_us: SECOND / 2, resume_us: SECOND / 2 },
        ..Standing::default()
    }
}

fn paused(class: Class, bytes: u64) -> Standing {
    let held = Held { away_bytes: bytes, ..Held::default() };
    Standing { is_active: false, held: BTreeMap::from([(gpu(0), held)]), ..active(class, 0) }
}

fn waits(tenant: &str) -> Waiting {
    Waiting { tenant: name(tenant), is_order: false }
}

fn scene(tenants: &[(&str, Standing)], waiting: &[Waiting]) -> Scene {
    let used = |standing: &Standing| standing.given_bytes(&gpu(0));
    let used_bytes: u64 = tenants.iter().map(|(_, standing)| used(standing)).sum();
    Scene {
        free_bytes: BTreeMap::from([(gpu(0), GPU_BYTES.saturating_sub(used_bytes))]),
        tenants: tenants
            .iter()
            .map(|(tenant, standing)| (name(tenant), standing.clone()))
            .collect(),
        waiting: waiting.to_vec(),
    }
}

fn only(scene: &Scene, history: &History) -> Decision {
    let decisions = decide(scene, history, &Settings::default(), NOW);
    assert_eq!(decisions.len(), 1);
    decisions[0].clone()
}

#[test]
fn a_tenant_that_fits_comes_and_nobody_is_paused() {
    let scene = scene(
        &[("train", active(Class::Fair, 40)), ("infer", paused(Class::Fair, 60))],
        &[waits("infer")],
    );
    let decision = only(&scene, &History::default());
    assert_eq!(decision.verdict, Verdict::Go(Vec::new()));
    assert_eq!(decision.reasons, ["'infer' is resumed: it fits beside what is there"]);
}

#[test]
fn what_is_in_the_way_is_paused_and_both_lines_say_why() {
    let scene = scene(
        &[("train", active(Class::Fair, 80)), ("infer", paused(Class::Fair, 60))],
        &[waits("infer")],
    );
    let decision = only(&scene, &History::default());
    assert_eq!(decision.verdict, Verdict::Go(vec![name("train")]));
    assert_eq!(
        decision.reasons,
        [
            "'train' (fair) is paused: takes no turns; it makes room on GPU-0: 80 bytes to be copied",
            "'infer' is resumed: it lacked 40 bytes on GPU-0",
        ]
    );
}

#[test]
fn a_tenant_that_fits_nowhere_is_told_so_and_nobody_is_paused() {
    let scene = scene(
        &[("train", active(Class::Fair, 20)), ("infer", paused(Class::Fair, 120))],
        &[waits("infer")],
    );
    let decision = only(&scene, &History::default());
    assert_eq!(decision.verdict, Verdict::Never);
    assert!(decision.reasons[0].contains("lacks 40 bytes on GPU-0"), "{decision:?}");
    let gone = Scene { waiting: vec![waits("nobody")], ..scene };
    assert_eq!(only(&gone, &History::default()).verdict, Verdict::Never);
}

#[test]
fn a_turn_lasts_its_quantum_against_its_class_its_bound_against_a_higher_one_and_wholly_against_a_lower()
 {
    let in_turn = Standing { has_turn: true, ..active(Class::Fair, 80) };
    let mut history = History::default();
    history.came(&name("train"), NOW - SECOND / 2);
    history.began_turn(&name("train"), false, NOW - SECOND / 2);
    let against = |class| {
        let scene =
            scene(&[("train", in_turn.clone()), ("infer", paused(class, 60))], &[waits("infer")]);
        only(&scene, &history)
    };
    // Ten times the second that both ways take.
    let fair = against(Class::Fair);
    assert_eq!(fair.verdict, Verdict::Wait(Some(NOW - SECOND / 2 + 10 * SECOND)));
    assert_eq!(
        fair.reasons,
        ["'infer' waits: 'train' (fair) is in its turn, and keeps it for 9500 ms more"]
    );
    assert_eq!(against(Class::Guaranteed).verdict, Verdict::Wait(Some(NOW + SECOND / 2)));
    assert_eq!(against(Class::Background).verdict, Verdict::Wait(None));
    history.tenants.get_mut("train").unwrap().turn_us = Some(NOW - 11 * SECOND);
    let scene = |standing: &Standing| {
        scene(&[("train", standing.clone()), ("infer", paused(Class::Fair, 60))], &[waits("infer")])
    };
    assert_eq!(only(&scene(&in_turn), &history).verdict, Verdict::Go(vec![name("train")]));
    // A turn that is over keeps nobody out.
    history.tenants.get_mut("train").unwrap().turn_us = Some(NOW - 1);
    let ended = Standing { has_turn: false, ..in_turn };
    let decision = only(&scene(&ended), &history);
    assert_eq!(decision.verdict, Verdict::Go(vec![name("train")]));
    assert!(decision.reasons[0].contains("its turn is over"), "{decision:?}");
}

#[test]
fn who_is_idle_by_evidence_makes_way_whatever_its_quantum() {
    for (class, idle_us, goes) in [
        (Class::Fair, 400_000, false),
        (Class::Fair, 600_000, true),
        (Class::Background, 40_000, false),
        (Class::Background, 60_000, true),
    ] {
        let idle =
            Standing { has_turn: true, idle_since_us: Some(NOW - idle_us), ..active(class, 80) };
        let mut history = History::default();
        history.came(&name("train"), NOW);
        history.began_turn(&name("train"), false, NOW);
        let scene = scene(&[("train", idle), ("infer", paused(class, 60))], &[waits("infer")]);
        let decision = only(&scene, &history);
        assert_eq!(matches!(decision.verdict, Verdict::Go(_)), goes, "{class} {idle_us}");
    }
}

#[test]
fn an_order_goes_first_and_is_held_up_by_nothing_but_a_turn() {
    let order = Waiting { is_order: true, ..waits("infer") };
    let mut history = History::default();
    history.came(&name("train"), NOW - 1);
    let tenants = |has_turn| {
        let train = Standing { has_turn, ..active(Class::Guaranteed, 80) };
        [
            ("train", train),
            ("infer", paused(Class::Background, 60)),
            ("other", paused(Class::Guaranteed, 60)),
        ]
    };
    let waiting = [waits("other"), order];
    let settings = Settings::default();
    let decisions = decide(&scene(&tenants(false), &waiting), &history, &settings, NOW);
    assert_eq!(decisions[1].verdict, Verdict::Go(vec![name("train")]));
    assert_eq!(decisions[0].verdict, Verdict::Wait(None));
    assert_eq!(decisions[0].reasons, ["'other' waits: 'infer' comes first"]);
    history.began_turn(&name("train"), false, NOW - SECOND);
    let decisions = decide(&scene(&tenants(true), &waiting), &history, &settings, NOW);
    assert_eq!(decisions[1].verdict, Verdict::Wait(Some(NOW + 9 * SECOND)));
}

#[test]
fn those_of_one_class_go_in_the_order_in_which_they_came_and_one_that_has_its_gpus_waits_too() {
    let mut history = History::default();
    history.came(&name("a"), NOW - SECOND);
    history.began_turn(&name("a"), false, NOW - SECOND);
    let tenants = [("a", active(Class::Fair, 80)), ("b", paused(Class::Fair, 80))];
    let decisions =
        decide(&scene(&tenants, &[waits("b"), waits("a")]), &history, &Settings::default(), NOW);
    assert_eq!(decisions[0].verdict, Verdict::Go(vec![name("a")]));
    assert_eq!(decisions[1].verdict, Verdict::Wait(None));
    // Its turn goes on in another process: this one joins it.
    let in_turn = Standing { has_turn: true, ..active(Class::Fair, 80) };
    let tenants = [("a", in_turn), ("b", paused(Class::Fair, 80))];
    let decisions =
        decide(&scene(&tenants, &[waits("b"), waits("a")]), &history, &Settings::default(), NOW);
    assert!(matches!(decisions[0].verdict, Verdict::Wait(Some(_))));
    assert_eq!(decisions[1].verdict, Verdict::Go(Vec::new()));
}

#[test]
fn one_that_is_pushed_out_again_and_again_stays_away_for_longer_and_says_so() {
    // Short turns of a higher class, with shorter gaps than a quantum.
    let often = Job {
        work_us: Some(100_000),
        think_us: 200_000,
        ..Job::new(Class::Guaranteed, &[0], SECOND)
    };
    let mut world = World::new(vec![often, Job::new(Class::Fair, &[0], SECOND)]);
    world.went_max = 10_000;
    world.run(300 * SECOND);
    assert!(world.grew.len() >= 3, "{:?}", world.grew);
    assert!(world.grew[0].starts_with("'t1' was pushed out 3 times within 4 quanta"));
    let before = world.tallies[1].pushed_out;
    world.run(600 * SECOND);
    let pushed_out = world.tallies[1].pushed_out - before;
    // It stays away for seven times its quantum of ten seconds.
    assert!(pushed_out <= 300 / 70 + 1, "{pushed_out}");
    assert!(pushed_out >= 1);
}

#[test]
fn shares_follow_weights() {
    let twice = Job { weight: "2".parse().unwrap(), ..Job::new(Class::Fair, &[0], SECOND) };
    let mut world = World::new(vec![Job::new(Class::Fair, &[0], SECOND), twice]);
    world.run(3600 * SECOND);
    let [one, two] = [world.tallies[0].in_turn_us, world.tallies[1].in_turn_us];
    assert!((one * 19 / 10..=one * 21 / 10).contains(&two), "{one} {two}");
}

#[test]
fn gangs_on_overlapping_gpus_take_all_or_none() {
    let jobs = [&[0, 1][..], &[1, 2], &[0, 2], &[0, 1, 2]];
    let jobs = jobs.iter().map(|gpus| Job::new(Class::Fair, gpus, SECOND)).collect();
    let mut world = World::new(jobs);
    world.run(1000 * SECOND);
    for tally in &world.tallies {
        assert!(tally.turns > 10, "{:?}", world.tallies);
    }
}
