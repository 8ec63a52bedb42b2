//! On which NUMA node the pages are placed that a thread is the first to touch.

use std::io;

/// Nodes that a policy can name: as many as the kernel can be built for.
pub const NODES_MAX: u32 = 1024;

/// The set of nodes as the kernel takes it, one bit each.
struct NodeMask([libc::c_ulong; (NODES_MAX / libc::c_ulong::BITS) as usize]);

impl NodeMask {
    fn of(nodes: &[u32]) -> NodeMask {
        let mut mask = NodeMask([0; _]);
        for node in nodes {
            assert!(*node < NODES_MAX);
            mask.0[(node / libc::c_ulong::BITS) as usize] |= 1 << (node % libc::c_ulong::BITS);
        }
        mask
    }
}

/// Places what the calling thread, and those that it starts from now on, touch first on `node`; elsewhere
/// where that node has no free memory.
pub fn prefer(node: u32) -> io::Result<()> {
    set_policy(libc::MPOL_PREFERRED, &NodeMask::of(&[node]))
}

/// The same, page by page on `nodes` in turns, by the page's number in its file.
pub fn interleave(nodes: &[u32]) -> io::Result<()> {
    set_policy(libc::MPOL_INTERLEAVE, &NodeMask::of(nodes))
}

fn set_policy(mode: libc::c_int, nodes: &NodeMask) -> io::Result<()> {
    // The kernel counts one bit less than it is told.
    let bits = libc::c_ulong::from(NODES_MAX) + 1;
    // SAFETY: the kernel reads NODES_MAX bits of `nodes`, which has as many and is alive for the whole call. A
    // policy decides where new pages are placed, and touches no memory.
    let result = unsafe { libc::syscall(libc::SYS_set_mempolicy, mode, nodes.0.as_ptr(), bits) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
