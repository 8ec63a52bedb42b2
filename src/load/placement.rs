//! On which NUMA node the pages of a load are placed.
//!
//! A page of a file in memory is placed when it is first touched, by the policy of the thread that touches it,
//! and threads inherit the policy of the one that starts them. So it is set once, on the thread that the load
//! runs on. A huge page made by `MADV_COLLAPSE` goes to the node of the page that the extent has already,
//! which is the one that was touched a moment before.

use std::path::Path;

use crate::error::{Error, Kind, Result};
use crate::sys::numa;

/// What the user asked for.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Placement {
    /// The kernel decides: on the node of the thread that loads.
    #[default]
    Anywhere,
    /// On one node, as long as it has free memory.
    Node(u32),
    /// On these nodes in turns, one huge page each.
    Interleave(Vec<u32>),
}

impl Placement {
    /// The placement of `--numa` where the machine has these `nodes`: a number, or `interleave`. With a single
    /// node there is nothing to place.
    ///
    /// # Errors
    ///
    /// [`Kind::Usage`] for a node that is not there.
    pub fn from_name(name: Option<&str>, nodes: &[u32]) -> Result<Placement> {
        let Some(name) = name else { return Ok(Placement::Anywhere) };
        let node = match name {
            "interleave" => None,
            number => {
                Some(number.parse::<u32>().ok().filter(|node| nodes.contains(node)).ok_or_else(|| {
                    let message = format!("there is no NUMA node {}", number.escape_debug());
                    Error::new(Kind::Usage, message).hint(match nodes {
                        [only] => {
                            format!("the only node that this process may use is {only}; leave out --numa")
                        }
                        nodes => format!("the nodes that this process may use are {}", listed(nodes)),
                    })
                })?)
            }
        };
        Ok(match (nodes, node) {
            ([_] | [], _) => Placement::Anywhere,
            (_, Some(node)) => Placement::Node(node),
            (nodes, None) => Placement::Interleave(nodes.to_vec()),
        })
    }

    /// Applies it to the calling thread, and to those that it starts from now on.
    pub fn apply(&self) -> Result<()> {
        let applied = match self {
            Placement::Anywhere => Ok(()),
            // Preferred and not bound: where the node is full, a bound load would end in the OOM killer.
            Placement::Node(node) => numa::prefer(*node),
            Placement::Interleave(nodes) => numa::interleave(nodes),
        };
        applied.map_err(|cause| {
            Error::os("set where memory is placed (set_mempolicy)", &cause)
                .hint("leave out --numa, or permit the call (containers: --cap-add SYS_NICE)")
        })
    }
}

/// Deals the nodes of an interleaved load out to the extents of one worker.
///
/// The kernel's own interleaving goes by page number: of extents that each begin at a multiple of 512 pages
/// all first pages would fall on the same node, and their huge pages follow them.
#[derive(Debug)]
pub(super) struct Turns {
    nodes: Vec<u32>,
    next: usize,
}

impl Turns {
    pub(super) fn of(placement: &Placement) -> Turns {
        let nodes = match placement {
            Placement::Interleave(nodes) => nodes.clone(),
            Placement::Anywhere | Placement::Node(_) => Vec::new(),
        };
        Turns { nodes, next: 0 }
    }

    /// What this thread touches from now on goes to the next node.
    pub(super) fn go_on(&mut self) {
        if let Some(node) = self.nodes.get(self.next) {
            // It worked for all of them when the load began. Where it does not now, the pages go elsewhere.
            let _ = numa::prefer(*node);
            self.next = (self.next + 1) % self.nodes.len();
        }
    }
}

/// The nodes with memory that this process may use, in order; node 0 where the kernel knows of none.
pub fn nodes() -> Vec<u32> {
    let read = |path: &str| std::fs::read_to_string(Path::new(path)).unwrap_or_default();
    let with_memory = ranges(&read("/sys/devices/system/node/has_memory"));
    let status = read("/proc/self/status");
    let allowed = status.lines().find_map(|line| line.strip_prefix("Mems_allowed_list:"));
    let nodes = usable(with_memory, allowed.map(ranges));
    if nodes.is_empty() { vec![0] } else { nodes }
}

fn usable(with_memory: Vec<u32>, allowed: Option<Vec<u32>>) -> Vec<u32> {
    match allowed {
        Some(allowed) => with_memory.into_iter().filter(|node| allowed.contains(node)).collect(),
        None => with_memory,
    }
}

/// The numbers in a list of the kernel's, such as `0-2,4`, below the most nodes that any kernel has.
fn ranges(text: &str) -> Vec<u32> {
    let mut numbers = Vec::new();
    for part in text.trim().split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        if let (Ok(first), Ok(last)) = (first.trim().parse::<u32>(), last.trim().parse::<u32>()) {
            numbers.extend(first..=last.min(numa::NODES_MAX - 1));
        }
    }
    numbers
}

fn listed(nodes: &[u32]) -> String {
    nodes.iter().map(u32::to_string).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_of_the_kernel_are_read() {
        assert_eq!(ranges("0\n"), [0]);
        assert_eq!(ranges("\t0-2,4,6-7\n"), [0, 1, 2, 4, 6, 7]);
        assert_eq!(ranges(""), [0; 0]);
        assert_eq!(ranges("0-4294967295").len() as u32, numa::NODES_MAX);
        assert_eq!(usable(vec![0, 1, 2], Some(vec![1, 2, 3])), [1, 2]);
        assert!(!nodes().is_empty());
    }

    #[test]
    fn an_absent_node_is_refused_with_those_that_are_there() {
        let placement = |name, nodes: &[u32]| Placement::from_name(Some(name), nodes);
        assert_eq!(placement("1", &[0, 1]).unwrap(), Placement::Node(1));
        assert_eq!(placement("interleave", &[0, 2]).unwrap(), Placement::Interleave(vec![0, 2]));
        assert_eq!(placement("0", &[0]).unwrap(), Placement::Anywhere);
        assert_eq!(placement("interleave", &[0]).unwrap(), Placement::Anywhere);
        assert_eq!(Placement::from_name(None, &[0, 1]).unwrap(), Placement::Anywhere);
        let error = placement("7", &[0, 1, 3]).unwrap_err();
        assert_eq!((error.kind(), error.message()), (Kind::Usage, "there is no NUMA node 7"));
        assert!(error.hint_text().unwrap().contains("0, 1, 3"), "{error:?}");
        assert!(placement("1", &[0]).unwrap_err().hint_text().unwrap().contains("is 0"));
    }

    #[test]
    fn nodes_take_turns() {
        let mut turns = Turns::of(&Placement::Interleave(vec![4, 5, 9]));
        let mut seen = Vec::new();
        for _ in 0..4 {
            seen.push(turns.nodes[turns.next]);
            turns.go_on();
        }
        assert_eq!(seen, [4, 5, 9, 4]);
        let mut none = Turns::of(&Placement::Node(1));
        none.go_on();
        assert_eq!(none.next, 0);
    }

    #[test]
    fn the_kernel_takes_a_policy_of_the_nodes_that_are_there() {
        // On a thread of its own, which it ends with.
        let applied = std::thread::spawn(|| {
            Placement::Interleave(nodes()).apply()?;
            Placement::Node(nodes()[0]).apply()
        });
        match applied.join().unwrap() {
            Err(error) if error.message().contains("EPERM") || error.message().contains("ENOSYS") => {
                crate::skipped(error.message());
            }
            other => other.unwrap(),
        }
        assert!(Placement::Node(numa::NODES_MAX - 1).apply().is_err(), "no machine has that many");
    }
}
