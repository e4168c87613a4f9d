//! Decisions one by one.

use std::collections::BTreeMap;

use super::clock::{GPU_BYTES, Job, World, gpu, name};
use crate::decision::history::History;
use crate::decision::scene::{Cost, Held, Scene, Standing, Waiting, Wish};
use crate::decision::{Decision, Verdict, decide};
use tenants::class::Class;

const SECOND: u64 = 1_000_000;
const NOW: u64 = 1_000 * SECOND;

fn active(class: Class, bytes: u64) -> Standing {
    let held = Held { copied_bytes: bytes, ..Held::default() };
    Standing {
        class,
        is_active: true,
        held: BTreeMap::from([(gpu(0), held)]),
        cost: Cost { pause_us: SECOND / 2, resume_us: SECOND / 2, is_measured: true },
        ..Standing::default()
    }
}

fn paused(class: Class, bytes: u64) -> Standing {
    let held = Held { away_bytes: bytes, ..Held::default() };
    Standing { is_active: false, held: BTreeMap::from([(gpu(0), held)]), ..active(class, 0) }
}

fn waits(tenant: &str) -> Waiting {
    Waiting { tenant: name(tenant), wish: Wish::Turn }
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
        ..Scene::default()
    }
}

fn only(scene: &Scene, history: &History) -> Decision {
    let decisions = decide(scene, history, NOW);
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
    assert_eq!(decision.reasons, ["'infer' is resumed: it fits next to what is there"]);
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
            "'train' (fair) is paused: has had no turn; it makes room on GPU-0: 80 B to be copied",
            "'infer' is resumed: it lacked 40 B on GPU-0",
        ]
    );
}

#[test]
fn what_a_tenant_on_its_way_holds_may_be_had_in_a_moment() {
    let leaves = Standing { is_active: false, ..active(Class::Fair, 80) };
    let wish = Wish::Memory(BTreeMap::from([(gpu(0), 60)]));
    let more = |tenant: &str| Waiting { tenant: name(tenant), wish: wish.clone() };
    let tenants = [("first", active(Class::Fair, 0)), ("leaves", leaves)];
    let mut scene = scene(&tenants, &[more("first")]);
    scene.moving.insert(name("leaves"));
    let decision = only(&scene, &History::default());
    assert_eq!(decision.verdict, Verdict::Wait(Some(NOW + 100_000)));
    assert_eq!(decision.reasons, ["'first' waits: 'leaves' is being paused or resumed"]);
    // One that has lost something gives nothing.
    scene.moving.clear();
    assert_eq!(only(&scene, &History::default()).verdict, Verdict::Never);
}

#[test]
fn one_tenant_that_is_in_the_way_of_two_on_two_gpus_is_paused_for_the_first_of_them_alone() {
    let on = |index: usize, held: Held| BTreeMap::from([(gpu(index), held)]);
    let holds = Held { copied_bytes: 80, ..Held::default() };
    let away = Held { away_bytes: 60, ..Held::default() };
    let both: BTreeMap<_, _> = [on(0, holds), on(1, holds)].into_iter().flatten().collect();
    let wide = Standing { held: both, ..active(Class::Fair, 0) };
    let first = Standing { held: on(0, away), ..paused(Class::Fair, 0) };
    let second = Standing { held: on(1, away), ..paused(Class::Fair, 0) };
    let tenants = [("first", first), ("second", second), ("wide", wide)];
    let mut scene = scene(&tenants, &[waits("first"), waits("second")]);
    scene.free_bytes = BTreeMap::from([(gpu(0), 20), (gpu(1), 20)]);
    let decisions = decide(&scene, &History::default(), NOW);
    assert_eq!(decisions[0].verdict, Verdict::Go(vec![name("wide")]));
    assert_eq!(decisions[1].verdict, Verdict::Wait(None));
    assert_eq!(decisions[1].reasons, ["'second' waits: 'wide' comes first"]);
}

#[test]
fn what_was_written_before_the_machine_was_started_is_forgotten() {
    let mut history = History::default();
    history.came(&name("train"), NOW);
    let here = history.clone().of_this_start("one", NOW + 1);
    assert_eq!(here.of(&name("train")).came_us, Some(NOW), "its start was not known");
    assert_eq!(here.clone().of_this_start("one", NOW + 1), here);
    // It has run for longer since, by the same clock.
    let empty = History { boot: "two".to_owned(), ..History::default() };
    assert_eq!(here.clone().of_this_start("two", NOW + 1), empty);
    assert!(here.of_this_start("", NOW - 1).tenants.is_empty());
}

#[test]
fn a_tenant_that_fits_nowhere_is_told_so_and_nobody_is_paused() {
    let scene = scene(
        &[("train", active(Class::Fair, 20)), ("infer", paused(Class::Fair, 120))],
        &[waits("infer")],
    );
    let decision = only(&scene, &History::default());
    assert_eq!(decision.verdict, Verdict::Never);
    assert!(decision.reasons[0].contains("lacks 40 B on GPU-0"), "{decision:?}");
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
fn who_is_idle_by_evidence_makes_way_before_its_quantum_is_over() {
    let cheap = Cost { pause_us: 1_000, resume_us: 1_000, is_measured: true };
    let dear = Cost { pause_us: SECOND / 2, resume_us: SECOND / 2, is_measured: true };
    let guessed = Cost { is_measured: false, ..dear };
    for (class, cost, idle_us, goes) in [
        (Class::Fair, cheap, 400_000, false),
        (Class::Fair, cheap, 600_000, true),
        (Class::Background, cheap, 40_000, false),
        (Class::Background, cheap, 60_000, true),
        // What is switched costs no more than what was idle.
        (Class::Fair, dear, 900_000, false),
        (Class::Fair, dear, 1_100_000, true),
        (Class::Background, dear, 900_000, false),
        // Nobody knows what its first switch takes.
        (Class::Fair, guessed, 400_000, false),
        (Class::Fair, guessed, 600_000, true),
        (Class::Background, guessed, 60_000, true),
    ] {
        let idle = Standing { idle_since_us: Some(NOW - idle_us), cost, ..active(class, 80) };
        let mut history = History::default();
        history.came(&name("train"), NOW - idle_us);
        // Its quantum is longer than that.
        history.tenants.get_mut("train").unwrap().growth = 8;
        let against = |standing: &Standing| {
            let waiting = Standing { cost, ..paused(class, 60) };
            let tenants = [("train", standing.clone()), ("infer", waiting)];
            only(&scene(&tenants, &[waits("infer")]), &history)
        };
        let decision = against(&idle);
        assert_eq!(matches!(decision.verdict, Verdict::Go(_)), goes, "{class} {idle_us}");
        let said = decision.reasons[0].contains("has launched nothing for");
        assert_eq!(said, goes, "{decision:?}");
        // In its turn it keeps them: its program says that it goes on.
        let in_turn = Standing { has_turn: true, ..idle };
        assert!(matches!(against(&in_turn).verdict, Verdict::Wait(Some(_))));
    }
}

#[test]
fn against_a_higher_class_who_is_idle_makes_way_at_once() {
    let idle = Standing { idle_since_us: Some(NOW - 60_000), ..active(Class::Background, 80) };
    let mut history = History::default();
    history.came(&name("train"), NOW - 60_000);
    let tenants = [("train", idle), ("infer", paused(Class::Fair, 60))];
    let decision = only(&scene(&tenants, &[waits("infer")]), &history);
    assert_eq!(decision.verdict, Verdict::Go(vec![name("train")]));
}

fn wants(tenant: &str, bytes: u64) -> Waiting {
    Waiting { tenant: name(tenant), wish: Wish::Memory(BTreeMap::from([(gpu(0), bytes)])) }
}

fn queues(standing: Standing) -> Standing {
    Standing { comes_back: true, ..standing }
}

#[test]
fn an_allocation_that_fits_is_tried_again_and_one_that_does_not_has_the_least_paused_that_suffices()
{
    let tenants = [
        ("train", queues(active(Class::Fair, 40))),
        ("infer", queues(active(Class::Fair, 20))),
        ("other", queues(active(Class::Fair, 30))),
    ];
    let decide = |bytes| only(&scene(&tenants, &[wants("train", bytes)]), &History::default());
    assert_eq!(decide(10).verdict, Verdict::Go(Vec::new()));
    let decision = decide(30);
    assert_eq!(decision.verdict, Verdict::Go(vec![name("infer")]));
    assert_eq!(decision.reasons[1], "'train' gets more memory: it lacked 20 B on GPU-0");
    assert_eq!(decide(40).verdict, Verdict::Go(vec![name("other")]));
    assert!(matches!(&decide(60).verdict, Verdict::Go(both) if both.len() == 2));
    // More than there is, even if all others make way: it is refused immediately, and nobody is stopped for it.
    let decision = decide(61);
    assert_eq!(decision.verdict, Verdict::Never);
    assert!(decision.reasons[0].contains("'train' cannot have more, even if all others make way"));
}

#[test]
fn an_allocation_takes_from_nobody_who_would_not_come_back_and_names_him() {
    let tenants = [("train", queues(active(Class::Fair, 40))), ("infer", active(Class::Fair, 60))];
    let back = Waiting { tenant: name("back"), wish: Wish::Back };
    for (waiting, verdict) in [(wants("train", 30), Verdict::Never), (back, Verdict::Wait(None))] {
        let mut scene = scene(&tenants, &[waiting]);
        scene.tenants.insert(name("back"), queues(paused(Class::Fair, 30)));
        scene.tenants.get_mut(&name("train")).unwrap().held.clear();
        let mut history = History::default();
        history.left(&name("back"), &scene, 0);
        let decision = only(&scene, &history);
        assert_eq!(decision.verdict, verdict);
        let why = &decision.reasons[0];
        assert!(why.contains("'infer' holds 60 B and does not come back by itself"), "{why}");
    }
    // A person's resume does, as a switch.
    let waiting = Waiting { tenant: name("back"), wish: Wish::Resume };
    let mut scene = scene(&tenants, &[waiting]);
    scene.tenants.insert(name("back"), paused(Class::Fair, 50));
    let decision = only(&scene, &History::default());
    assert_eq!(decision.verdict, Verdict::Go(vec![name("infer")]));
}

#[test]
fn who_got_more_keeps_it_for_a_quantum_and_who_was_paused_for_it_waits_in_the_order_of_claims() {
    let mut history = History::default();
    history.came(&name("train"), NOW - 100 * SECOND);
    let before = scene(
        &[("train", queues(active(Class::Fair, 40))), ("infer", queues(active(Class::Fair, 40)))],
        &[wants("train", 40)],
    );
    assert_eq!(only(&before, &history).verdict, Verdict::Go(vec![name("infer")]));
    history.left(&name("infer"), &before, NOW - SECOND);
    history.got_more(&name("train"), &before, NOW - SECOND);
    let after = scene(
        &[("train", queues(active(Class::Fair, 80))), ("infer", queues(paused(Class::Fair, 40)))],
        &[Waiting { tenant: name("infer"), wish: Wish::Back }],
    );
    assert_eq!(only(&after, &history).verdict, Verdict::Wait(Some(NOW + 9 * SECOND)));
    // While the first still is about to take what was made free, nobody who came later gets it.
    let between = scene(
        &[("train", queues(active(Class::Fair, 40))), ("infer", queues(paused(Class::Fair, 40)))],
        &[wants("train", 40), Waiting { tenant: name("infer"), wish: Wish::Back }],
    );
    let decisions = decide(&between, &history, NOW + 100 * SECOND);
    assert_eq!(decisions[0].verdict, Verdict::Go(Vec::new()));
    assert_eq!(decisions[1].reasons, ["'infer' waits: 'train' comes first"]);
}

#[test]
fn one_that_waits_for_memory_and_was_paused_meanwhile_comes_back_with_room_for_both() {
    let tenants =
        [("train", queues(paused(Class::Fair, 40))), ("infer", queues(active(Class::Fair, 40)))];
    // By name it stays so, also with a thread that waits.
    let decision = only(&scene(&tenants, &[wants("train", 15)]), &History::default());
    assert_eq!(decision.verdict, Verdict::Wait(None));
    assert!(decision.reasons[0].contains("`sublet resume train`"), "{decision:?}");
    let mut history = History::default();
    history.left(&name("train"), &scene(&tenants, &[]), 0);
    let decision = only(&scene(&tenants, &[wants("train", 15)]), &history);
    assert_eq!(decision.verdict, Verdict::Go(Vec::new()));
    let decision = only(&scene(&tenants, &[wants("train", 30)]), &history);
    assert_eq!(decision.verdict, Verdict::Go(vec![name("infer")]));
    assert_eq!(decision.reasons[1], "'train' is resumed: it lacked 10 B on GPU-0");
}

#[test]
fn an_order_goes_first_and_is_held_up_by_nothing_but_a_turn() {
    let order = Waiting { wish: Wish::Order, ..waits("infer") };
    let mut history = History::default();
    history.came(&name("train"), NOW - 1);
    // Those that wait and are switched slowly are no matter to an order.
    let cost = Cost { pause_us: 9 * SECOND, resume_us: 9 * SECOND, is_measured: true };
    let tenants = |has_turn| {
        let train = Standing { has_turn, ..active(Class::Guaranteed, 80) };
        [
            ("train", train),
            ("infer", paused(Class::Background, 60)),
            ("other", Standing { cost, ..paused(Class::Guaranteed, 60) }),
        ]
    };
    let waiting = [waits("other"), order];
    let decisions = decide(&scene(&tenants(false), &waiting), &history, NOW);
    assert_eq!(decisions[1].verdict, Verdict::Go(vec![name("train")]));
    assert_eq!(decisions[0].verdict, Verdict::Wait(None));
    assert_eq!(decisions[0].reasons, ["'other' waits: 'infer' comes first"]);
    history.began_turn(&name("train"), false, NOW - SECOND);
    let decisions = decide(&scene(&tenants(true), &waiting), &history, NOW);
    assert_eq!(decisions[1].verdict, Verdict::Wait(Some(NOW + 9 * SECOND)));
}

#[test]
fn those_of_one_class_go_in_the_order_in_which_they_came_and_one_that_has_its_gpus_waits_too() {
    let mut history = History::default();
    history.came(&name("a"), NOW - SECOND);
    history.began_turn(&name("a"), false, NOW - SECOND);
    let tenants = [("a", active(Class::Fair, 80)), ("b", paused(Class::Fair, 80))];
    let decisions = decide(&scene(&tenants, &[waits("b"), waits("a")]), &history, NOW);
    assert_eq!(decisions[0].verdict, Verdict::Go(vec![name("a")]));
    assert_eq!(decisions[1].verdict, Verdict::Wait(None));
    // Its turn goes on in another process: this one joins it.
    let in_turn = Standing { has_turn: true, ..active(Class::Fair, 80) };
    let tenants = [("a", in_turn), ("b", paused(Class::Fair, 80))];
    let decisions = decide(&scene(&tenants, &[waits("b"), waits("a")]), &history, NOW);
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

/// `waits` wants what `a` has, which could not be paused.
fn with_refusal(b: Option<Standing>, wish: Wish) -> (Scene, History) {
    let comes_back = |standing: Standing| Standing { comes_back: true, ..standing };
    let mut tenants =
        vec![("a", comes_back(active(Class::Background, 40))), ("waits", paused(Class::Fair, 60))];
    tenants.extend(b.map(|b| ("b", comes_back(b))));
    let free_bytes = BTreeMap::from([(gpu(0), 20)]);
    let waiting = vec![Waiting { tenant: name("waits"), wish }];
    let scene = Scene { free_bytes, ..scene(&tenants, &waiting) };
    let mut history = History::default();
    history.refused(&name("a"), "it captures a graph", SECOND / 10, NOW - SECOND / 2);
    (scene, history)
}

#[test]
fn who_could_not_be_paused_is_passed_over_for_others_and_waited_for_where_there_are_none() {
    let b = active(Class::Fair, 40);
    let (with_other, history) = with_refusal(Some(b), Wish::Turn);
    assert_eq!(only(&with_other, &history).verdict, Verdict::Go(vec![name("b")]));
    let (alone, history) = with_refusal(None, Wish::Turn);
    let decision = only(&alone, &history);
    assert_eq!(decision.verdict, Verdict::Wait(None), "it may never go: others are not held up");
    assert_eq!(
        decision.reasons,
        [
            "'waits' waits: 'a' could not be paused (it captures a graph), and is asked again in 500 ms"
        ]
    );
    // Both, where neither suffices.
    let (both, history) = with_refusal(Some(active(Class::Fair, 20)), Wish::Turn);
    assert_eq!(only(&both, &history).verdict, Verdict::Wait(None));
    // A person has it tried, and first the others.
    let (order, history) = with_refusal(None, Wish::Order);
    assert_eq!(only(&order, &history).verdict, Verdict::Go(vec![name("a")]));
    let (order, history) = with_refusal(Some(active(Class::Fair, 40)), Wish::Order);
    assert_eq!(only(&order, &history).verdict, Verdict::Go(vec![name("b")]));
}

#[test]
fn who_cannot_be_paused_is_asked_less_and_less_often_until_it_can() {
    let a = name("a");
    let mut history = History::default();
    let mut now_us = NOW;
    let mut rests = Vec::new();
    for times in 1..=9 {
        let line = history.refused(&a, "it captures", SECOND / 10, now_us);
        assert!(line.contains(&format!("could not be paused, {times} time")), "{line}");
        assert!(line.ends_with("(it captures)"), "{line}");
        let until_us = history.of(&a).refusal.unwrap().until_us;
        rests.push((until_us - now_us) / SECOND);
        now_us = until_us;
    }
    assert_eq!(rests, [1, 2, 4, 8, 16, 32, 60, 60, 60]);
    // One whose tries take long is stopped for no more than a tenth of the time.
    let mut rests = Vec::new();
    for _ in 0..5 {
        history.refused(&name("slow"), "no cut", 30 * SECOND, now_us);
        let until_us = history.of(&name("slow")).refusal.unwrap().until_us;
        rests.push((until_us - now_us) / SECOND);
        now_us = until_us;
    }
    assert_eq!(rests, [30, 60, 120, 240, 300]);
    // Long ago counts for nothing, and neither does what was before it could be paused.
    history.refused(&a, "it captures", 1, now_us + 3600 * SECOND);
    assert_eq!(history.of(&a).refusal.map(|refusal| refusal.times), Some(1));
    let mut by_name = history.clone();
    by_name.note_back(&scene(&[("a", active(Class::Fair, 40))], &[]));
    assert!(by_name.of(&a).refusal.is_some());
    by_name.note_back(&scene(&[("a", paused(Class::Fair, 40))], &[]));
    assert!(by_name.of(&a).refusal.is_none());
    history.left(&a, &Scene::default(), now_us);
    assert!(history.of(&a).refusal.is_none());
}
