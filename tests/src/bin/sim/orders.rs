//! What the simulation tells its workers, and what they answer: lines of JSON over a socket pair.
//!
//! Orders are numbered, and answers carry the number, so that a worker whose work waits at the gate of a
//! paused tenant can still be told about faults.

use std::collections::HashMap;
use std::fmt;
use std::io::{BufRead as _, BufReader, ErrorKind, Write as _};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use sublet_tests::{Outcome, Trouble};

use crate::tally::Counts;

/// What a worker is to do.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) enum Order {
    /// Do these steps together with the others of its tenant. Waits at the gate while paused.
    Work { first: u64, last: u64, seed: u64 },
    /// Compare all that it can reach with what it has written.
    Check {
        /// Tags that may be paused.
        away: Vec<String>,
        /// Allocations of its own with tickets that nobody has redeemed.
        open: Vec<u128>,
    },
    /// On a thread of its own, after some time.
    Trade { after_us: u64, deal: Deal },
    /// What is on record, whatever state it is in.
    Inventory,
    /// That process has ended: what was imported from it may be lost by a pause.
    Ended { owner: u64 },
    /// Take part in these communicators and no others.
    Communicate(Generation),
    /// Make driver calls fail by these rules.
    Fail { rules: String },
    /// No call fails any more.
    FailNoMore,
    /// The host memory that a pause may take.
    HostLimit { room: HostRoom },
    /// How long files of its own may be.
    FileLimit { most_bytes: Option<u64> },
    /// How many more descriptors it may open; none: as many as before.
    TableLimit { spare: Option<usize> },
    /// Where what it has saved lies.
    Saved,
    /// Free everything and end. The rest as for [`Order::Check`].
    Leave { away: Vec<String>, open: Vec<u128> },
}

/// The host memory that saved contents may take.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) enum HostRoom {
    /// As much as there is.
    Plenty,
    /// None, by the user's word.
    Nothing,
    /// What a machine has, in which these processes hold some.
    Shared { total_bytes: u64, pids: Vec<u32> },
}

/// Where what a process has saved lies.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct Saved {
    /// In its file, to make room for others, in bytes.
    pub(crate) spilled_bytes: u64,
}

/// Something that is done with memory that crosses processes.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) enum Deal {
    /// Make so much new memory that others may come for.
    Offer { count: usize },
    /// Come for this.
    Accept { offers: Vec<Offer> },
    /// Let all go that is shared, in this order: the communicator ends here.
    End { order: EndOrder },
    /// Let one piece go, or close one handle that was opened twice.
    LetOneGo,
    /// Let go of what was imported from this process.
    DropImports { owner: u64 },
    /// Have a ticket of its own hold nothing any more.
    Settle { ticket: Vec<u8> },
    /// A network card takes some memory.
    Pin,
    /// Pause or resume memory of its own with this tag.
    OwnTag { tag: String, is_pause: bool },
    /// Fill one piece that has a tag, if its memory is not away.
    Touch,
}

/// What goes first when a communicator ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum EndOrder {
    ImportsFirst,
    OwnFirst,
    Any,
}

impl fmt::Debug for Paper {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ticket(_) => f.write_str("ticket"),
            Self::Handle(_) => f.write_str("handle"),
        }
    }
}

/// What somebody comes with.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Paper {
    /// Holds memory until it is redeemed, once.
    Ticket(Vec<u8>),
    /// As `cudaIpc` makes them: holds nothing, and may be opened as often as one likes.
    Handle(Vec<u8>),
}

impl Order {
    /// Can it be obeyed while the tenant is paused, without passing the gate?
    pub(crate) fn is_aside(&self) -> bool {
        matches!(
            self,
            Self::Fail { .. }
                | Self::FailNoMore
                | Self::HostLimit { .. }
                | Self::FileLimit { .. }
                | Self::TableLimit { .. }
                | Self::Saved
                | Self::Trade { .. }
                | Self::Inventory
        )
    }
}

/// Memory that one worker offers to another.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Offer {
    /// Which offer it is.
    pub(crate) number: u64,
    pub(crate) paper: Paper,
    /// The allocation's identity.
    pub(crate) id: u128,
    /// Its size in units of the driver's granularity.
    pub(crate) units: u64,
    /// What it holds.
    pub(crate) pattern: u64,
    /// Does a pause keep that?
    pub(crate) is_kept: bool,
    /// Who offers it, by the simulation's number.
    pub(crate) owner: u64,
    /// The device that it lies on.
    pub(crate) device: i32,
    /// The tag of its region.
    pub(crate) tag: String,
}

/// What came of an offer.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Taken {
    pub(crate) offer: u64,
    pub(crate) how: TakenHow,
}

/// See [`Taken`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum TakenHow {
    /// It is mapped.
    Held,
    /// It was redeemed, and could not be mapped, for the reason of a fault.
    Dropped,
    /// The same, for another reason.
    NotMapped { why: Why, text: String },
    /// It was refused. Was that by a fault in the process that came?
    Refused { why: Why, text: String, is_explained: bool },
}

/// Why memory of another process was not to be had.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Why {
    /// Its tag is paused.
    Away,
    /// Its owner lives, and has freed it.
    Freed,
    /// Its owner does not answer.
    OwnerSilent,
    /// Anything else.
    Else,
}

/// An allocation on record.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Item {
    pub(crate) id: u128,
    pub(crate) is_own: bool,
    pub(crate) is_resident: bool,
    /// It is paged, and a resume of everything does not bring it.
    pub(crate) is_away_by_turns: bool,
    pub(crate) device: i32,
    pub(crate) bytes: u64,
    pub(crate) tag: String,
}

/// One set of communicators over the living workers of a tenant.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Generation {
    /// Which; part of the communicators' identities.
    pub(crate) number: u64,
    /// Where ranks say how far their devices have come.
    pub(crate) board: PathBuf,
    /// This worker's rank.
    pub(crate) rank: u32,
    /// How many there are.
    pub(crate) ranks: u32,
}

/// What a worker answers.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) enum Answer {
    /// Obeyed.
    Done,
    /// The steps are done, or were given up because a rank died.
    Worked(Worked),
    /// All contents are right, and this is what it holds.
    Account(Account),
    /// To [`Deal::Offer`].
    Offers(Vec<Offer>),
    /// To [`Deal::Accept`].
    Taken(Vec<Taken>),
    /// To [`Deal::OwnTag`]: why not, where it did not.
    Tagged(Option<String>),
    /// To [`Deal::Touch`].
    Touched { was_away: bool },
    /// To [`Order::Inventory`].
    Inventory(Vec<Item>),
    /// To [`Order::Saved`].
    Saved(Saved),
    /// How many calls were made to fail since the rules were given.
    Failed(u64),
    /// Something is not as it must be.
    Violation(String),
}

/// What came of some steps.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Worked {
    /// Launches that were counted by the cut.
    pub(crate) launches: u64,
    /// Changes of its own memory.
    pub(crate) changes: u64,
    /// Of these, refused by the driver.
    pub(crate) refused: u64,
}

/// What a worker holds.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Account {
    /// Bytes of its own by device, by its own count.
    pub(crate) own_bytes: Vec<u64>,
    /// Allocations of ended processes that it holds still.
    pub(crate) orphans: usize,
    /// Bytes that were compared.
    pub(crate) checked_bytes: u64,
    /// Imports that a pause has lost, since the last account.
    pub(crate) lost: u64,
    /// Open descriptors, but for those of memory.
    pub(crate) fds: usize,
    /// What they are.
    pub(crate) descriptors: Vec<String>,
    /// Driver objects.
    pub(crate) objects: String,
    /// Slabs of its own.
    pub(crate) slabs: u64,
    /// Allocations that are parts of them.
    pub(crate) cells: u64,
    /// What was done with memory that is paged, since the last account.
    pub(crate) paged: Counts,
    /// Anonymous resident memory, without the arena for saved contents.
    pub(crate) resident_bytes: u64,
}

/// One end of the conversation.
#[derive(Debug)]
pub(crate) struct Link {
    reader: BufReader<UnixStream>,
    writer: UnixStream,
    /// A line that has come in part.
    partial: String,
    early: HashMap<u64, Answer>,
    next: u64,
}

impl Link {
    pub(crate) fn new(stream: UnixStream) -> Outcome<Self> {
        let writer = stream.try_clone()?;
        let reader = BufReader::new(stream);
        Ok(Self { reader, writer, partial: String::new(), early: HashMap::new(), next: 0 })
    }

    /// Sends an order; returns its number.
    pub(crate) fn send(&mut self, order: &Order) -> Outcome<u64> {
        self.next += 1;
        write_line(&mut self.writer, &(self.next, order))?;
        Ok(self.next)
    }

    /// The answer to the order of this number.
    pub(crate) fn answer(&mut self, number: u64, deadline: Instant) -> Outcome<Answer> {
        loop {
            if let Some(answer) = self.early.remove(&number) {
                return Ok(answer);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            self.reader.get_ref().set_read_timeout(Some(left.max(Duration::from_millis(1))))?;
            match self.reader.read_line(&mut self.partial) {
                Ok(0) => return Err(Trouble::new("it has ended")),
                Ok(_) => {
                    let (number, answer) = serde_json::from_str(&self.partial)?;
                    self.partial.clear();
                    self.early.insert(number, answer);
                }
                Err(error)
                    if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) =>
                {
                    return Err(Trouble::new("it did not answer in time"));
                }
                Err(error) => return Err(error.into()),
            }
        }
    }
}

/// Writes one message as a line.
pub(crate) fn write_line(stream: &mut UnixStream, message: &impl Serialize) -> Outcome {
    let mut line = serde_json::to_string(message)?;
    line.push('\n');
    stream.write_all(line.as_bytes())?;
    Ok(())
}
