//! Contexts that leave in turns: the longest paused first.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::decision::history::History;
use crate::decision::scene::{Contexts, Held, Scene, Standing, Waiting, Wish};
use crate::decision::{Decision, Verdict, decide, is_due};
use tenants::coordinator::ProcessBytes;
use tenants::identity::TenantName;

const GPU: &str = "GPU-0";
const GIB: u64 = 1 << 30;
/// Later than any quantum.
const NOW: u64 = 1_000_000_000;
const STAY: Contexts = Contexts { processes: 1, may_leave: false, are_away: false };
const MAY: Contexts = Contexts { may_leave: true, ..STAY };
const AWAY: Contexts = Contexts { are_away: true, ..STAY };

fn name(text: &str) -> TenantName {
    TenantName::new(text).unwrap()
}

fn runs(gib: u64, contexts: Contexts) -> Standing {
    let held = Held { copied_bytes: gib * GIB, ..Held::default() };
    let held = BTreeMap::from([(GPU.to_owned(), held)]);
    Standing { is_active: true, comes_back: true, held, contexts, ..Standing::default() }
}

fn rests(gib: u64, contexts: Contexts) -> Standing {
    let held = Held { away_bytes: gib * GIB, ..Held::default() };
    let held = BTreeMap::from([(GPU.to_owned(), held)]);
    Standing { is_active: false, held, ..runs(gib, contexts) }
}

/// One that has nothing on the GPU yet.
fn new() -> Standing {
    Standing { is_active: true, ..Standing::default() }
}

fn more(gib: u64) -> Wish {
    Wish::Memory(BTreeMap::from([(GPU.to_owned(), gib * GIB)]))
}

fn a_context() -> Wish {
    Wish::Context(GPU.to_owned())
}

fn sink(tenant: &str) -> Verdict {
    Verdict::Sink(name(tenant))
}

fn go(tenants: &[&str]) -> Verdict {
    Verdict::Go(tenants.iter().map(|tenant| name(tenant)).collect())
}

/// `tenants`, which came and were paused in this order, with `free_bytes` free.
fn scene(tenants: &[(&str, Standing)], free_bytes: u64) -> Scene {
    Scene {
        free_bytes: BTreeMap::from([(GPU.to_owned(), free_bytes)]),
        tenants: tenants.iter().map(|(tenant, is)| (name(tenant), is.clone())).collect(),
        ..Scene::default()
    }
}

/// Decides what the tenant `who` is to do, which wants `wish`.
fn decided(tenants: &[(&str, Standing)], who: &str, wish: Wish, free_bytes: u64) -> Decision {
    decided_with(tenants, who, wish, free_bytes, |_| {})
}

fn decided_with(
    tenants: &[(&str, Standing)],
    who: &str,
    wish: Wish,
    free_bytes: u64,
    change: impl FnOnce(&mut Scene),
) -> Decision {
    let mut history = History::default();
    for (at_us, (tenant, standing)) in (1..).zip(tenants) {
        history.came(&name(tenant), at_us);
        if !standing.is_active {
            history.left(&name(tenant), &Scene::default(), at_us);
        }
    }
    let mut scene = scene(tenants, free_bytes);
    scene.waiting.push(Waiting { tenant: name(who), wish });
    change(&mut scene);
    decide(&scene, &history, NOW).remove(0)
}

#[test]
fn contexts_leave_when_their_tenant_has_rested_for_its_time() {
    let minute = Duration::from_mins(1);
    assert!(is_due(minute, Some(minute)) && !is_due(minute / 2, Some(minute)));
    assert!(!is_due(minute, None));
}

#[test]
fn what_pauses_do_not_give_the_contexts_of_those_that_rest_do_the_longest_rested_first() {
    let tenants = |contexts| {
        let all = [rests(4, contexts), rests(4, contexts), runs(4, contexts), runs(0, contexts)];
        let mut all = all.into_iter();
        ["b", "a", "runs", "wants"].map(|tenant| (tenant, all.next().unwrap()))
    };
    let said = decided(&tenants(MAY), "wants", more(5), GIB / 2);
    assert_eq!(said.verdict, sink("b"));
    assert_eq!(
        said.reasons,
        ["the contexts of 'b' leave too: it rests; 'wants' lacks 4.5 GiB on GPU-0"]
    );
    // A pause that suffices is enough,
    assert_eq!(decided(&tenants(MAY), "wants", more(4), GIB / 2).verdict, go(&["runs"]));
    // and nothing is done that cannot be enough.
    assert_eq!(decided(&tenants(MAY), "wants", more(9), GIB / 2).verdict, Verdict::Never);
    // One that keeps them is named, with what helps.
    let said = decided(&tenants(STAY), "wants", more(5), GIB / 2);
    assert_eq!(said.verdict, Verdict::Never);
    assert!(said.reasons[0].contains("'b', 'a' stay there: `sublet pause b --deep`"), "{said:?}");
    assert!(said.reasons[0].contains("--turns auto,deep"), "{said:?}");
}

#[test]
fn nobody_is_told_to_take_the_contexts_off_of_the_one_that_is_to_come() {
    let tenants = [("job", rests(4, STAY)), ("rests", rests(4, STAY))];
    for (tenants, named) in [(&tenants[..1], ""), (&tenants, "; the contexts of 'rests' stay")] {
        let said = decided(tenants, "job", Wish::Back, GIB);
        let (_, rest) = said.reasons[0].split_once("end what holds the rest").unwrap();
        assert!(rest.starts_with(named) && rest.is_empty() == named.is_empty(), "{said:?}");
    }
}

#[test]
fn one_that_is_larger_than_its_gpu_is_told_so_and_nobody_else_is_blamed() {
    let tenants = [("job", rests(6, STAY)), ("rests", rests(4, STAY)), ("runs", runs(1, STAY))];
    let of_five = |scene: &mut Scene| {
        scene.total_bytes.insert(GPU.to_owned(), 5 * GIB);
        let both = [(7, 2), (8, 4)].map(|(pid, gib)| ProcessBytes { pid, bytes: gib * GIB });
        let job = scene.tenants.iter_mut().find(|(name, _)| name.as_str() == "job");
        job.unwrap().1.processes.insert(GPU.to_owned(), both.into());
    };
    let said = decided_with(&tenants, "job", Wish::Back, 4 * GIB, of_five);
    let words = "it needs 6 GiB on GPU-0, which has 5 GiB in all: end some of its processes (`sublet ps -v`): process 7 has 2 GiB, \
                 process 8 has 4 GiB";
    assert!(said.reasons[0].ends_with(words), "{said:?}");
    // What it has counts for one that wants more.
    let said = decided_with(&tenants, "runs", more(5), GIB, of_five);
    assert!(said.reasons[0].contains("it needs 6 GiB on GPU-0"), "{said:?}");
}

#[test]
fn one_that_runs_gives_its_contexts_when_nobody_rests_and_it_would_make_way() {
    let tenants = [("runs", runs(4, MAY)), ("stays", runs(4, STAY)), ("wants", runs(0, MAY))];
    for (tenants, gib) in [(vec![&tenants[0], &tenants[2]], 5), (tenants.iter().collect(), 9)] {
        let tenants: Vec<_> = tenants.into_iter().cloned().collect();
        let said = decided(&tenants, "wants", more(gib), GIB / 2);
        assert_eq!(said.verdict, sink("runs"));
        let why = "the contexts of 'runs' leave too: has run for 999 s, ";
        assert!(said.reasons[0].starts_with(why), "{said:?}");
        let busy = |scene: &mut Scene| {
            scene.tenants.get_mut(&name("runs")).unwrap().cost.pause_us = NOW;
        };
        let said = decided_with(&tenants, "wants", more(gib), GIB / 2, busy);
        assert!(
            matches!(said.verdict, Verdict::Wait(Some(until_us)) if until_us > NOW),
            "{said:?}"
        );
    }
}

#[test]
fn before_contexts_come_back_others_leave_unless_there_is_room_for_both() {
    let tenants = [("rests", rests(4, MAY)), ("deep", rests(4, AWAY)), ("runs", runs(4, MAY))];
    assert_eq!(decided(&tenants, "deep", Wish::Back, GIB / 2).verdict, sink("rests"));
    assert_eq!(decided(&tenants, "deep", Wish::Back, 5 * GIB).verdict, go(&[]));
    // Nobody rests that could: those of who is paused for it leave with it.
    let said = decided(&tenants[1..], "deep", Wish::Back, GIB / 2);
    assert_eq!((said.verdict, said.contexts_leave), (go(&["runs"]), true));
    // By all figures it fits, and it did not.
    let is_short = |scene: &mut Scene| assert!(scene.short.insert(name("deep")));
    let said = decided_with(&tenants[1..], "deep", Wish::Back, 4 * GIB, is_short);
    assert_eq!(said.verdict, go(&["runs"]));
}

#[test]
fn for_a_first_context_one_makes_way_at_a_time_whatever_is_free() {
    let tenants = [("rests", rests(4, MAY)), ("runs", runs(4, MAY)), ("new", new())];
    assert_eq!(decided(&tenants, "new", a_context(), GIB).verdict, sink("rests"));
    assert_eq!(decided(&tenants[1..], "new", a_context(), GIB).verdict, go(&["runs"]));
    assert_eq!(decided(&tenants[2..], "new", a_context(), GIB).verdict, Verdict::Never);
}

#[test]
fn contexts_that_could_not_leave_are_waited_for_a_few_times_and_then_they_are_known_to_stay() {
    let mut history = History::default();
    let mut scene = scene(&[("rests", rests(4, MAY)), ("wants", runs(0, MAY))], GIB / 2);
    scene.waiting.push(Waiting { tenant: name("wants"), wish: more(1) });
    let mut now_us = NOW;
    for times in 1..=3 {
        assert_eq!(decide(&scene, &history, now_us)[0].verdict, sink("rests"));
        let line = history.kept_contexts(&name("rests"), "no driver", 1, now_us);
        assert!(line.starts_with("the contexts of 'rests' could not leave, "), "{line}");
        // A paused tenant could be paused, which says nothing of its contexts.
        history.note_back(&scene);
        let until_us = history.of(&name("rests")).keeps_contexts.unwrap().until_us;
        let verdict = if times < 3 { Verdict::Wait(Some(until_us)) } else { Verdict::Never };
        assert_eq!(decide(&scene, &history, now_us)[0].verdict, verdict);
        now_us = until_us;
    }
    scene.tenants.get_mut(&name("rests")).unwrap().contexts = AWAY;
    history.note_back(&scene);
    assert_eq!(history.of(&name("rests")).keeps_contexts, None);
}

#[test]
fn one_on_its_way_is_passed_over_and_one_that_waits_to_come_back_goes_last() {
    let tenants = [("first", rests(4, MAY)), ("second", rests(4, MAY)), ("new", new())];
    let moves = |scene: &mut Scene| assert!(scene.moving.insert(name("first")));
    let waits = |scene: &mut Scene| {
        scene.waiting.push(Waiting { tenant: name("first"), wish: Wish::Back });
    };
    assert_eq!(decided(&tenants, "new", a_context(), GIB).verdict, sink("first"));
    assert_eq!(decided_with(&tenants, "new", a_context(), GIB, moves).verdict, sink("second"));
    assert_eq!(decided_with(&tenants, "new", a_context(), GIB, waits).verdict, sink("second"));
}
