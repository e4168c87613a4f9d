//! The choice of tenants whose contexts leave the GPUs too. A pause leaves contexts there: 0.5 to 0.8 GiB a process
//! (H100, driver 580, torch 2.11). Those of a tenant that says so leave
//!
//! * when it has rested for its time ([`is_due`]);
//! * when another comes whose own contexts are away, or makes its first one, and the GPU has less room than that may take: the
//!   one that has rested longest goes first, and one that waits to come back last;
//! * when another lacks more than all that pauses give back: those that rest first, then those that run and would make way.
//!
//! Nobody is asked how much memory a context takes: one leaves, and the decision is made again with what is free then.

use std::collections::BTreeMap;
use std::time::Duration;

use super::decide::{Decision, Hold, Verdict, View};
use super::history::Refusal;
use super::scene::{CONTEXT_BYTES, Standing, Waiting};
use super::victims::Candidate;
use crate::identity::TenantName;
use crate::size::Size;

/// The number of failed tries from which on contexts that could not leave are no longer waited for. A tenant that needs
/// their room is refused then.
const TRIES_MAX: u32 = 3;

/// Are the contexts of a paused tenant to leave that has rested for so long, and is not in the queue to come back?
pub fn is_due(rested: Duration, after: Option<Duration>) -> bool {
    after.is_some_and(|after| rested >= after)
}

impl<'a> View<'a> {
    /// Returns the bytes that one that waits takes on each GPU. Where they are not known, it returns more than is free.
    pub(super) fn lacks(
        &self,
        waiting: &'a Waiting,
        standing: &'a Standing,
    ) -> BTreeMap<&'a str, u64> {
        let mut lacks = standing.lacks(&waiting.wish);
        let is_short = self.scene.short.contains(&waiting.tenant);
        let known: Vec<_> = lacks.keys().copied().filter(|_| is_short).collect();
        for gpu in known.into_iter().chain(waiting.wish.context()) {
            let free_bytes = self.scene.free_bytes.get(gpu).copied().unwrap_or(0);
            let bytes = lacks.entry(gpu).or_default();
            *bytes = (*bytes).max(free_bytes.saturating_add(1));
        }
        lacks
    }

    /// Decides that contexts of a tenant that rests leave first, if the GPU may lack room for those that come.
    pub(super) fn makes_way_for_contexts(
        &self,
        waiting: &'a Waiting,
        standing: &Standing,
        lacks: &BTreeMap<&'a str, u64>,
    ) -> Option<Decision> {
        let margin_bytes = standing.margin_bytes();
        let is_unknown =
            waiting.wish.context().is_some() || self.scene.short.contains(&waiting.tenant);
        if margin_bytes == 0 && !is_unknown {
            return None;
        }
        let with_margin =
            |(gpu, bytes): (&&'a str, &u64)| (*gpu, bytes.saturating_add(margin_bytes));
        let short = self.short(lacks.iter().map(with_margin).collect());
        self.resting(waiting, &short).first().map(|rests| Self::sinks(waiting, rests, &short))
    }

    /// Decides which contexts leave where `all` that could make way give less than is `short`, if contexts may be
    /// enough. A tenant that has its GPUs keeps them as `holds` says.
    pub(super) fn gives_contexts(
        &self,
        waiting: &'a Waiting,
        short: &BTreeMap<&'a str, u64>,
        all: &[Candidate<'a>],
        holds: &BTreeMap<&'a TenantName, Hold>,
    ) -> Option<Decision> {
        let resting = self.resting(waiting, short);
        let may_leave = |tenant: &&TenantName| self.scene.tenants[*tenant].contexts.may_leave;
        let could = || all.iter().map(|candidate| candidate.tenant).filter(may_leave);
        let goes = |tenant: &&TenantName| {
            self.refuses(tenant).is_none() && self.keeps_contexts(tenant).is_none()
        };
        let run = || could().filter(goes);
        let are_enough = |tenants: Vec<&TenantName>| {
            short.iter().all(|(gpu, bytes)| {
                let gives = all.iter().filter_map(|candidate| candidate.gives.get(*gpu));
                let contexts = tenants.iter().map(|tenant| {
                    let standing = &self.scene.tenants[*tenant];
                    let is_there = standing.held.contains_key(*gpu);
                    let processes = if is_there { standing.contexts.processes } else { 0 };
                    processes.saturating_mul(CONTEXT_BYTES)
                });
                gives.copied().chain(contexts).fold(0, u64::saturating_add) >= *bytes
            })
        };
        if !are_enough(resting.iter().copied().chain(run()).collect()) {
            let could_rest = self.could_rest(waiting, short);
            let all: Vec<_> = could_rest.into_iter().chain(could()).collect();
            let keep =
                all.iter().filter_map(|tenant| Some((*tenant, self.keeps_contexts(tenant)?)));
            let asked_again = keep.filter(|(_, refusal)| refusal.times < TRIES_MAX);
            let (tenant, refusal) = asked_again.min_by_key(|(_, refusal)| refusal.until_us)?;
            let why = format!("the contexts of '{tenant}' could not leave ({})", refusal.why);
            let wait = Decision::wait(waiting, Some(refusal.until_us), &why);
            return are_enough(all).then_some(wait);
        }
        if let Some(rests) = resting.first() {
            return Some(Self::sinks(waiting, rests, short));
        }
        let free = run().find_map(|tenant| match holds.get(tenant)? {
            Hold::Free(why) => Some((tenant, why)),
            Hold::Until(..) | Hold::WhileItLasts(_) => None,
        });
        if let Some((tenant, why)) = free {
            let reason = format!(
                "'{tenant}' is paused, and its contexts leave too: {why}; '{}' lacks {}",
                waiting.tenant,
                in_words(short)
            );
            return Some(Decision::new(waiting, Verdict::Sink(tenant.clone()), vec![reason]));
        }
        let until = run().filter_map(|tenant| match holds.get(tenant)? {
            Hold::Until(until_us, why) => Some((*until_us, why)),
            Hold::Free(_) | Hold::WhileItLasts(_) => None,
        });
        until.min().map(|(until_us, why)| Decision::wait(waiting, Some(until_us), why))
    }

    /// Returns the failed tries to take the contexts of `tenant` off, if it is too early to try again.
    fn keeps_contexts(&self, tenant: &TenantName) -> Option<&'a Refusal> {
        let past = self.history.tenants.get(tenant.as_str())?;
        past.keeps_contexts.as_ref().filter(|refusal| refusal.until_us > self.now_us)
    }

    /// Those of [`View::could_rest`] whose contexts are to leave now if they can; who is to give them first is first.
    fn resting(&self, waiting: &Waiting, short: &BTreeMap<&str, u64>) -> Vec<&'a TenantName> {
        let mut resting = self.could_rest(waiting, short);
        resting.retain(|tenant| self.keeps_contexts(tenant).is_none());
        resting
    }

    /// Tenants that rest, and whose contexts could make room on one of these GPUs.
    fn could_rest(&self, waiting: &Waiting, short: &BTreeMap<&str, u64>) -> Vec<&'a TenantName> {
        let could = |(tenant, standing): &(&TenantName, &Standing)| {
            **tenant != waiting.tenant
                && !standing.is_active
                && standing.contexts.may_leave
                && !self.scene.moving.contains(*tenant)
                && short.keys().any(|gpu| standing.held.contains_key(*gpu))
        };
        let mut resting: Vec<_> =
            self.scene.tenants.iter().filter(could).map(|(tenant, _)| tenant).collect();
        resting.sort_by_key(|tenant| {
            let waits = self.scene.waiting.iter().any(|other| other.tenant == **tenant);
            (waits, self.history.of(tenant).left_us, *tenant)
        });
        resting
    }

    fn sinks(waiting: &Waiting, rests: &TenantName, short: &BTreeMap<&str, u64>) -> Decision {
        let what = if waiting.wish.context().is_some() {
            "room for a context".to_owned()
        } else {
            in_words(short)
        };
        let reason = format!(
            "the contexts of '{rests}', which rests, leave too: '{}' lacks {what}",
            waiting.tenant
        );
        Decision::new(waiting, Verdict::Sink(rests.clone()), vec![reason])
    }

    /// Names the tenants that rest and keep contexts on GPUs that are `short`, and the command that helps.
    pub(super) fn keep_contexts(&self, waiting: &Waiting, short: &BTreeMap<&str, u64>) -> String {
        let keeps = |(tenant, standing): &(&TenantName, &Standing)| {
            **tenant != waiting.tenant
                && !standing.is_active
                && standing.contexts.processes > 0
                && !standing.contexts.are_away
                && short.keys().any(|gpu| standing.held.contains_key(*gpu))
        };
        let keep: Vec<_> =
            self.scene.tenants.iter().filter(keeps).map(|(tenant, _)| tenant).collect();
        let Some(first) = keep.first() else { return String::new() };
        let named: Vec<_> = keep.iter().map(|tenant| format!("'{tenant}'")).collect();
        format!(
            "; the contexts of {} stay there: `sublet pause {first} --deep` takes them off too, and `sublet run --turns auto,deep` has that happen \
             by itself",
            named.join(", ")
        )
    }
}

fn in_words(short: &BTreeMap<&str, u64>) -> String {
    let each: Vec<_> =
        short.iter().map(|(gpu, bytes)| format!("{} on {gpu}", Size(*bytes))).collect();
    each.join(", ")
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::turns::decide;
    use crate::turns::history::History;
    use crate::turns::scene::{Contexts, Held, Scene, Wish};

    const GPU: &str = "GPU-0";
    const GIB: u64 = 1 << 30;
    /// Later than any quantum.
    const NOW: u64 = 1_000_000_000;

    fn name(text: &str) -> TenantName {
        TenantName::new(text).unwrap()
    }

    fn standing(is_active: bool, gib: u64, contexts: Contexts) -> Standing {
        let bytes = gib * GIB;
        let held = if is_active {
            Held { copied_bytes: bytes, ..Held::default() }
        } else {
            Held { away_bytes: bytes, ..Held::default() }
        };
        let held = BTreeMap::from([(GPU.to_owned(), held)]);
        Standing { is_active, comes_back: true, held, contexts, ..Standing::default() }
    }

    const STAY: Contexts = Contexts { processes: 1, may_leave: false, are_away: false };
    const MAY: Contexts = Contexts { may_leave: true, ..STAY };
    const AWAY: Contexts = Contexts { are_away: true, ..STAY };

    /// Decides what the tenant `who` is to do, which wants `wish`, with `free_bytes` free.
    fn decided(
        tenants: &[(&str, Standing)],
        (who, wish): (&str, Wish),
        free_bytes: u64,
    ) -> Decision {
        decided_with(tenants, (who, wish), free_bytes, |_| {})
    }

    fn decided_with(
        tenants: &[(&str, Standing)],
        (who, wish): (&str, Wish),
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
        let all = tenants.iter().map(|(tenant, standing)| (name(tenant), standing.clone()));
        let mut scene = Scene {
            free_bytes: BTreeMap::from([(GPU.to_owned(), free_bytes)]),
            tenants: all.collect(),
            waiting: vec![Waiting { tenant: name(who), wish }],
            ..Scene::default()
        };
        change(&mut scene);
        decide(&scene, &history, NOW).remove(0)
    }

    fn more(gib: u64) -> Wish {
        Wish::Memory(BTreeMap::from([(GPU.to_owned(), gib * GIB)]))
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
            [
                ("b", standing(false, 4, contexts)),
                ("a", standing(false, 4, contexts)),
                ("runs", standing(true, 4, contexts)),
                ("wants", standing(true, 0, contexts)),
            ]
        };
        let said = decided(&tenants(MAY), ("wants", more(5)), GIB / 2);
        assert_eq!(said.verdict, Verdict::Sink(name("b")));
        assert_eq!(
            said.reasons,
            ["the contexts of 'b', which rests, leave too: 'wants' lacks 4.5 GiB on GPU-0"]
        );
        // A pause that suffices is enough,
        assert_eq!(
            decided(&tenants(MAY), ("wants", more(4)), GIB / 2).verdict,
            Verdict::Go(vec![name("runs")])
        );
        // and nothing is done that cannot be enough.
        assert_eq!(decided(&tenants(MAY), ("wants", more(9)), GIB / 2).verdict, Verdict::Never);
        // One that keeps them is named, with what helps.
        let said = decided(&tenants(STAY), ("wants", more(5)), GIB / 2);
        assert_eq!(said.verdict, Verdict::Never);
        assert!(said.reasons[0].contains("`sublet pause a --deep`"), "{said:?}");
        assert!(said.reasons[0].contains("--turns auto,deep"), "{said:?}");
    }

    #[test]
    fn nobody_is_told_to_take_the_contexts_off_of_the_one_that_is_to_come() {
        let tenants = [("job", standing(false, 4, STAY)), ("rests", standing(false, 4, STAY))];
        for (tenants, named) in
            [(&tenants[..1], ""), (&tenants[..], "; the contexts of 'rests' stay")]
        {
            let said = decided(tenants, ("job", Wish::Back), GIB);
            let (_, rest) = said.reasons[0].split_once("end what holds the rest").unwrap();
            assert!(rest.starts_with(named) && rest.is_empty() == named.is_empty(), "{said:?}");
        }
    }

    #[test]
    fn one_that_is_larger_than_its_gpu_is_told_so_and_nobody_else_is_blamed() {
        let tenants = [
            ("job", standing(false, 6, STAY)),
            ("rests", standing(false, 4, STAY)),
            ("runs", standing(true, 1, STAY)),
        ];
        let of_five = |scene: &mut Scene| {
            scene.total_bytes.insert(GPU.to_owned(), 5 * GIB);
        };
        let said = decided_with(&tenants, ("job", Wish::Back), 4 * GIB, of_five);
        let words = "it needs 6 GiB on GPU-0, which has 5 GiB in all: end some of its processes (`sublet ps -v` lists them)";
        assert!(said.reasons[0].ends_with(words), "{said:?}");
        // What it has counts for one that wants more.
        let said = decided_with(&tenants, ("runs", more(5)), GIB, of_five);
        assert!(said.reasons[0].contains("it needs 6 GiB on GPU-0"), "{said:?}");
    }

    #[test]
    fn one_that_runs_gives_its_contexts_when_nobody_rests_and_it_would_make_way() {
        let tenants = [("runs", standing(true, 4, MAY)), ("wants", standing(true, 0, MAY))];
        let said = decided(&tenants, ("wants", more(5)), GIB / 2);
        assert_eq!(said.verdict, Verdict::Sink(name("runs")));
        let busy = |scene: &mut Scene| {
            scene.tenants.get_mut(&name("runs")).unwrap().cost.pause_us = NOW;
        };
        let said = decided_with(&tenants, ("wants", more(5)), GIB / 2, busy);
        assert!(
            matches!(said.verdict, Verdict::Wait(Some(until_us)) if until_us > NOW),
            "{said:?}"
        );
    }

    #[test]
    fn before_contexts_come_back_others_leave_unless_there_is_room_for_both() {
        let tenants = [
            ("rests", standing(false, 4, MAY)),
            ("deep", standing(false, 4, AWAY)),
            ("runs", standing(true, 4, MAY)),
        ];
        let back = || ("deep", Wish::Back);
        assert_eq!(decided(&tenants, back(), GIB / 2).verdict, Verdict::Sink(name("rests")));
        assert_eq!(decided(&tenants, back(), 5 * GIB).verdict, Verdict::Go(Vec::new()));
        // Nobody rests that could: those of who is paused for it leave with it.
        let said = decided(&tenants[1..], back(), GIB / 2);
        assert_eq!((said.verdict, said.contexts_leave), (Verdict::Go(vec![name("runs")]), true));
        // By all figures it fits, and it did not.
        let is_short = |scene: &mut Scene| assert!(scene.short.insert(name("deep")));
        let said = decided_with(&tenants[1..], back(), 4 * GIB, is_short);
        assert_eq!(said.verdict, Verdict::Go(vec![name("runs")]));
    }

    #[test]
    fn for_a_first_context_one_makes_way_at_a_time_whatever_is_free() {
        let tenants = [
            ("rests", standing(false, 4, MAY)),
            ("runs", standing(true, 4, MAY)),
            ("new", Standing { is_active: true, ..Standing::default() }),
        ];
        let wish = || ("new", Wish::Context(GPU.to_owned()));
        assert_eq!(decided(&tenants, wish(), GIB).verdict, Verdict::Sink(name("rests")));
        let said = decided(&tenants[1..], wish(), GIB);
        assert_eq!(said.verdict, Verdict::Go(vec![name("runs")]));
        assert_eq!(decided(&tenants[2..], wish(), GIB).verdict, Verdict::Never);
    }

    #[test]
    fn contexts_that_could_not_leave_are_waited_for_a_few_times_and_then_they_are_known_to_stay() {
        let tenants = [("rests", standing(false, 4, MAY)), ("wants", standing(true, 0, MAY))];
        let mut history = History::default();
        let scene = Scene {
            free_bytes: BTreeMap::from([(GPU.to_owned(), GIB / 2)]),
            tenants: tenants.into_iter().map(|(tenant, is)| (name(tenant), is)).collect(),
            waiting: vec![Waiting { tenant: name("wants"), wish: more(1) }],
            ..Scene::default()
        };
        let mut now_us = NOW;
        for times in 1..=TRIES_MAX {
            let sinks = Verdict::Sink(name("rests"));
            assert_eq!(decide(&scene, &history, now_us)[0].verdict, sinks);
            let line = history.kept_contexts(&name("rests"), "no driver", 1, now_us);
            assert!(line.starts_with("the contexts of 'rests' could not leave, "), "{line}");
            // A paused tenant could be paused, which says nothing of its contexts.
            history.note_back(&scene);
            let said = decide(&scene, &history, now_us).remove(0);
            if times == TRIES_MAX {
                assert_eq!(said.verdict, Verdict::Never);
            } else if let Verdict::Wait(Some(until_us)) = said.verdict {
                now_us = until_us;
            } else {
                panic!("{times}: {said:?}");
            }
        }
        let mut away = scene;
        away.tenants.get_mut(&name("rests")).unwrap().contexts = AWAY;
        history.note_back(&away);
        assert_eq!(history.of(&name("rests")).keeps_contexts, None);
    }

    #[test]
    fn one_that_could_not_leave_and_one_on_its_way_are_passed_over() {
        let tenants = [
            ("first", standing(false, 4, MAY)),
            ("second", standing(false, 4, MAY)),
            ("new", Standing { is_active: true, ..Standing::default() }),
        ];
        let wish = || ("new", Wish::Context(GPU.to_owned()));
        let moves = |scene: &mut Scene| assert!(scene.moving.insert(name("first")));
        let said = decided_with(&tenants, wish(), GIB, moves);
        assert_eq!(said.verdict, Verdict::Sink(name("second")));
        // One that waits to come back goes last.
        let waits = |scene: &mut Scene| {
            scene.waiting.push(Waiting { tenant: name("first"), wish: Wish::Back });
        };
        let said = decided_with(&tenants, wish(), GIB, waits);
        assert_eq!(said.verdict, Verdict::Sink(name("second")));
    }
}
