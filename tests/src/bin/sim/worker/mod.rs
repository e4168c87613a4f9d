//! One process of a tenant: a real member over the simulated driver, which works, and checks every byte.
//!
//! The thread that started reads orders and obeys those that must not wait; a second thread does the rest,
//! as an application's own thread does, and waits at the gate while the tenant is paused.

mod board;
mod calls;
mod cells;
mod collectives;
mod exchange;
mod holdings;
mod host;
mod memory;
mod paged;

use std::io::{BufRead as _, BufReader};
use std::os::fd::AsFd as _;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use sublet_tests::{Outcome, Trouble};
use tenants::error_text::chain;
use tenants::identity::TenantName;
use tenants::keep;
use tenants::member::{Member, MemberConfig};
use tenants::requests::act_for_own_tags;
use tenants::run_dir::RunDir;
use tenants::scope::TagNames;
use tenants::wire::Action;
use vmm_pool::driver::DeviceOrdinal;
use vmm_pool::driver::sim::{SimDriver, SimNode, SimOptions};
use vmm_pool::{PieceBytes, Stance};

use crate::orders::{Answer, Deal, Item, Order, Worked, write_line};
use collectives::Collectives;
use exchange::Exchange;
use holdings::Holdings;

pub(crate) use board::Board;
pub(crate) use exchange::TAGS;
pub(crate) use memory::writer_of;

/// What a worker is started with.
#[derive(Clone, Debug)]
pub(crate) struct Charter {
    pub(crate) node: PathBuf,
    pub(crate) run_dir: PathBuf,
    pub(crate) tenant: String,
    /// The simulation's number for it.
    pub(crate) number: u64,
    /// The devices that it uses, the one that its collectives run on first.
    pub(crate) devices: Vec<i32>,
    /// How much memory it may have, in units of the driver's granularity.
    pub(crate) units_max: u64,
    /// May it have contents that a pause keeps? Each process with some takes a chunk of host memory.
    pub(crate) is_keeper: bool,
    pub(crate) seed: u64,
}

impl Charter {
    pub(crate) fn to_words(&self) -> Vec<String> {
        vec![
            self.node.display().to_string(),
            self.run_dir.display().to_string(),
            self.tenant.clone(),
            self.number.to_string(),
            self.devices.iter().map(i32::to_string).collect::<Vec<_>>().join(","),
            self.units_max.to_string(),
            self.is_keeper.to_string(),
            self.seed.to_string(),
        ]
    }

    pub(crate) fn from_words(words: &[String]) -> Outcome<Self> {
        let [node, run_dir, tenant, number, devices, units_max, is_keeper, seed] = words else {
            return Err(Trouble::new("a worker is started by the simulation only"));
        };
        Ok(Self {
            node: node.into(),
            run_dir: run_dir.into(),
            tenant: tenant.clone(),
            number: number.parse()?,
            devices: devices.split(',').map(str::parse).collect::<Result<_, _>>()?,
            units_max: units_max.parse()?,
            is_keeper: is_keeper.parse()?,
            seed: seed.parse()?,
        })
    }
}

type Sim = Member<SimDriver>;

/// For a pause or resume of a process's own tags.
const OWN_TAG_TIMEOUT: Duration = Duration::from_secs(30);

/// The second thread's own.
struct Application {
    member: Arc<Sim>,
    holdings: Holdings,
    exchange: Arc<Exchange>,
    collectives: Collectives,
}

/// Obeys orders from standard input, which is a socket, until it closes.
pub(crate) fn run(charter: &Charter) -> Outcome {
    let stream = UnixStream::from(std::io::stdin().as_fd().try_clone_to_owned()?);
    let node = SimNode::open(&charter.node)?;
    // Others find it by its id as long as it lives.
    let _standing = node.stand()?;
    let driver = Arc::new(SimDriver::new(node, SimOptions::default()));
    let run_dir = RunDir::open(Some(charter.run_dir.clone()), None)?;
    let tenant = TenantName::new(&charter.tenant)?;
    let command = format!("worker {}", charter.number);
    let plain = MemberConfig::new(run_dir, tenant, &command, "simulation");
    let anywhere: fn(&std::path::Path) -> bool = |_| true;
    let spills = host::spills(charter.seed).then_some(anywhere);
    let settings = keep::Settings { spills, ..keep::Settings::default() };
    let config = MemberConfig { host_limits: host::limits, ..plain };
    let member = keep::join(config, settings, driver)?;
    // Who imports memory of others touches it only while it is there.
    exchange::TAGS.into_iter().for_each(tenants::region::agree_to_run_without);
    member.pool().host_memory().set_file_dir(host::file_dir(&charter.node, charter.seed));
    // Most find what is zero and what has not changed, and some copy all.
    member.pool().copies().detect_changes(!charter.seed.is_multiple_of(8));
    member.pool().copies().set_piece_bytes(piece_bytes(charter.seed));
    member.pool().copies().give_back(host::gives_back(charter.seed));
    let pager = paged::Open::default();
    let home = charter.devices.first().copied().unwrap_or_default();
    let exchange = Arc::new(Exchange::new(Arc::clone(&member), charter));
    let application = Application {
        holdings: Holdings::new(Arc::clone(&member), charter, Arc::clone(&pager))?,
        exchange: Arc::clone(&exchange),
        collectives: Collectives::new(Arc::clone(&member), DeviceOrdinal(home))?,
        member: Arc::clone(&member),
    };
    let writer = Arc::new(Mutex::new(stream.try_clone()?));
    let (tasks, inbox) = channel();
    let answers = Arc::clone(&writer);
    host::handle_signals()?;
    let worker = thread::spawn(move || application.obey(&inbox, &answers));
    // What works and waits takes them, and not who reads orders.
    host::leave_signals()?;
    listen(stream, (&member, &exchange, &pager), &tasks, &writer)?;
    drop(tasks);
    if worker.is_finished() {
        // It was told to leave; otherwise it may wait at the gate for ever, and ends with the process.
        return worker.join().map_err(|_| Trouble::new("the application's thread panicked"))?;
    }
    Ok(())
}

fn piece_bytes(seed: u64) -> PieceBytes {
    let sizes = [16 << 10, 64 << 10, 2 << 20].map(PieceBytes::new);
    sizes[usize::try_from(seed >> 8).unwrap_or_default() % 3].unwrap_or_default()
}

fn listen(
    stream: UnixStream,
    (member, exchange, pager): (&Arc<Sim>, &Arc<Exchange>, &paged::Open),
    tasks: &Sender<(u64, Order)>,
    writer: &Arc<Mutex<UnixStream>>,
) -> Outcome {
    for line in BufReader::new(stream).lines() {
        let (number, order): (u64, Order) = serde_json::from_str(&line?)?;
        if let Order::Trade { after_us, deal } = order {
            let (member, exchange) = (Arc::clone(member), Arc::clone(exchange));
            let writer = Arc::clone(writer);
            thread::spawn(move || {
                host::take_signals().ok();
                let_time_pass(Duration::from_micros(after_us));
                let answer = deal_with(&member, &exchange, deal)
                    .unwrap_or_else(|trouble| Answer::Violation(trouble.to_string()));
                // The process that asked may have ended.
                say(&writer, number, &answer).ok();
            });
        } else if order.is_aside() {
            say(writer, number, &obey_aside(member, pager, &order))?;
        } else if tasks.send((number, order)).is_err() {
            break;
        }
    }
    Ok(())
}

#[expect(
    clippy::disallowed_methods,
    reason = "random instants are what the simulation is about, and other processes tell nobody"
)]
fn let_time_pass(time: Duration) {
    thread::sleep(time);
}

fn deal_with(member: &Sim, exchange: &Exchange, deal: Deal) -> Outcome<Answer> {
    let done = |()| Answer::Done;
    match deal {
        Deal::Offer { count } => exchange.offer(count).map(Answer::Offers),
        Deal::Accept { offers } => exchange.accept(offers).map(Answer::Taken),
        Deal::End { order } => exchange.end(order).map(done),
        Deal::LetOneGo => exchange.let_one_go().map(done),
        Deal::DropImports { owner } => exchange.drop_imports(owner).map(done),
        Deal::Settle { ticket } => exchange.settle(&ticket).map(done),
        Deal::Pin => {
            exchange.pin_one();
            Ok(Answer::Done)
        }
        Deal::Touch => exchange.touch().map(|was_away| Answer::Touched { was_away }),
        Deal::OwnTag { tag, is_pause } => {
            let action = if is_pause { Action::Pause } else { Action::Resume };
            let tags = TagNames::Named([tag].into());
            let acted = act_for_own_tags(member, tags, action, Some(OWN_TAG_TIMEOUT));
            Ok(Answer::Tagged(acted.err().map(|error| chain(&error))))
        }
    }
}

fn inventory(member: &Sim, pager: &paged::Open) -> Vec<Item> {
    // What is paged is to be counted only while it is there.
    let all = member.pool().holdings().inventory(Stance::StandsStill).into_iter();
    all.filter_map(|found| {
        Some(Item {
            id: u128::from_be_bytes(found.id.0),
            is_own: found.is_own(),
            is_resident: found.is_resident,
            is_away_by_turns: !found.is_resident && paged::is_away(pager, &found.ranges),
            device: found.device?.0,
            bytes: found.size_bytes,
            tag: found.class.tag,
        })
    })
    .collect()
}

fn obey_aside(member: &Sim, pager: &paged::Open, order: &Order) -> Answer {
    let faults = member.pool().driver().faults();
    match order {
        Order::Fail { rules } => match faults.parse(rules) {
            Ok(()) => Answer::Done,
            Err(rule) => Answer::Violation(format!("not a rule: {rule}")),
        },
        Order::FailNoMore => {
            faults.clear();
            Answer::Failed(faults.fired())
        }
        Order::HostLimit { room } => {
            host::set_room(room);
            Answer::Done
        }
        Order::FileLimit { most_bytes } => match host::limit_files(*most_bytes) {
            Ok(()) => Answer::Done,
            Err(trouble) => Answer::Violation(trouble.to_string()),
        },
        Order::TableLimit { spare } => match host::limit_table(*spare) {
            Ok(()) => Answer::Done,
            Err(trouble) => Answer::Violation(trouble.to_string()),
        },
        Order::Saved => Answer::Saved(host::saved(member)),
        Order::Inventory => Answer::Inventory(inventory(member, pager)),
        Order::Work { .. }
        | Order::Check { .. }
        | Order::Trade { .. }
        | Order::Ended { .. }
        | Order::Communicate(_)
        | Order::Leave { .. } => Answer::Violation(format!("{order:?} is not to be obeyed aside")),
    }
}

fn say(writer: &Mutex<UnixStream>, number: u64, answer: &Answer) -> Outcome {
    let mut stream = writer.lock().unwrap_or_else(PoisonError::into_inner);
    write_line(&mut stream, &(number, answer))
}

impl Application {
    fn obey(mut self, inbox: &Receiver<(u64, Order)>, writer: &Mutex<UnixStream>) -> Outcome {
        while let Ok((number, order)) = inbox.recv() {
            let is_last = matches!(order, Order::Leave { .. });
            let answer = self
                .obey_one(order)
                .unwrap_or_else(|trouble| Answer::Violation(self.with_last_words(&trouble)));
            say(writer, number, &answer)?;
            if is_last {
                break;
            }
        }
        Ok(())
    }

    /// Also why its device failed, if it did.
    fn with_last_words(&self, trouble: &Trouble) -> String {
        let words = self.member.pool().driver().core().last_words();
        words.map_or(trouble.to_string(), |words| format!("{trouble}; the device: {words}"))
    }

    fn obey_one(&mut self, order: Order) -> Outcome<Answer> {
        let done = |()| Answer::Done;
        match order {
            Order::Work { first, last, seed } => self.work(first, last, seed).map(Answer::Worked),
            Order::Check { away, open } => {
                self.holdings.check(&self.exchange, &away, &open).map(Answer::Account)
            }
            Order::Ended { owner } => {
                self.exchange.owner_ended(owner);
                Ok(Answer::Done)
            }
            Order::Communicate(generation) => self.collectives.join(generation).map(done),
            Order::Leave { away, open } => {
                self.collectives.leave()?;
                let account = self.holdings.free_all(&self.exchange, &away, &open)?;
                self.member.leave();
                Ok(Answer::Account(account))
            }
            Order::Fail { .. }
            | Order::FailNoMore
            | Order::HostLimit { .. }
            | Order::FileLimit { .. }
            | Order::TableLimit { .. }
            | Order::Saved
            | Order::Trade { .. }
            | Order::Inventory => Err(Trouble::new("an order to be obeyed aside")),
        }
    }

    /// The steps that all ranks of the tenant do in the same order, with changes of its own between them.
    fn work(&mut self, first: u64, last: u64, seed: u64) -> Outcome<Worked> {
        let mut worked = Worked::default();
        for step in first..last {
            if self.collectives.are_aborted()? {
                // As a job does that hears of a dead rank: `ncclCommAbort`.
                self.collectives.leave()?;
                break;
            }
            worked.launches += self.collectives.step(seed, step)?;
            if self.holdings.wants_a_change() {
                worked.changes += 1;
                worked.refused += u64::from(!self.holdings.change()?);
            }
        }
        self.collectives.wait()?;
        self.holdings.wait()?;
        Ok(worked)
    }
}
