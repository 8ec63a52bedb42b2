//! Which file systems other machines may share: there neither locks nor sockets tell the truth.

use std::os::fd::BorrowedFd;

use rustix::fs;

/// Magic numbers of network and cluster file systems, as `statfs` gives them.
const SHARED: [(u32, &str); 19] = [
    (0x0000_6969, "NFS"),
    (0x0000_517b, "SMB"),
    (0xfe53_4d42, "SMB2"),
    (0xff53_4d42, "CIFS"),
    (0x00c3_6400, "Ceph"),
    (0x0102_1997, "9p"),
    (0x5346_414f, "AFS"),
    (0x6b41_4653, "AFS"),
    (0x7375_7245, "Coda"),
    (0x0000_564c, "NCP"),
    (0x0bd0_0bd0, "Lustre"),
    (0x4750_4653, "GPFS"),
    (0x7461_636f, "OCFS2"),
    (0x0116_1970, "GFS2"),
    (0xaad7_aaea, "PanFS"),
    (0x1983_0326, "BeeGFS"),
    (0x786f_4256, "VirtualBox shared folder"),
    (0xbacb_acbc, "VMware shared folder"),
    (0x2003_0528, "OrangeFS"),
];

const FUSE: u32 = 0x6573_5546;

/// FUSE file systems that live on this machine alone.
const LOCAL_FUSE: [&str; 5] =
    ["fuseblk", "fuse.fuse-overlayfs", "fuse.gocryptfs", "fuse.encfs", "fuse.cryfs"];

/// The kind of network file system behind `directory`, or `None` on a local one.
pub(super) fn network_kind(directory: BorrowedFd<'_>) -> rustix::io::Result<Option<String>> {
    let found = fs::fstatfs(directory)?;
    // The numbers are 32 bits wide; some kernels hand them out sign-extended.
    let magic = found.f_type as u32;
    if magic != FUSE {
        return Ok(SHARED.iter().find(|row| row.0 == magic).map(|row| row.1.to_owned()));
    }
    let device = fs::fstat(directory)?.st_dev;
    let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    Ok(fuse_network_kind(&mounts, fs::major(device), fs::minor(device)))
}

/// A FUSE file system counts as a network one unless it is known to be local: sshfs, s3fs, rclone and
/// the like have nothing in common but their name's first letters.
fn fuse_network_kind(mountinfo: &str, major: u32, minor: u32) -> Option<String> {
    let device = format!("{major}:{minor}");
    let kind = mountinfo.lines().find_map(|line| {
        let (mount, file_system) = line.split_once(" - ")?;
        (mount.split(' ').nth(2) == Some(device.as_str())).then(|| file_system.split(' ').next())?
    });
    match kind {
        Some(kind) if LOCAL_FUSE.contains(&kind) => None,
        Some(kind) => Some(kind.to_owned()),
        None => Some("FUSE".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;

    const MOUNTS: &str = "\
22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
40 22 0:45 / /home/u/far rw,nosuid shared:2 master:3 - fuse.sshfs host:/ rw,user_id=1000
41 22 0:46 / /mnt/stick rw - fuseblk /dev/sdb1 rw
";

    #[test]
    fn fuse_is_a_network_unless_known_to_be_local() {
        assert_eq!(fuse_network_kind(MOUNTS, 0, 45).as_deref(), Some("fuse.sshfs"));
        assert_eq!(fuse_network_kind(MOUNTS, 0, 46), None);
        assert_eq!(fuse_network_kind(MOUNTS, 0, 99).as_deref(), Some("FUSE"));
        assert_eq!(fuse_network_kind("rubbish\n - \n", 0, 45).as_deref(), Some("FUSE"));
    }

    #[test]
    fn tmpfs_and_proc_are_local() {
        for path in ["/dev/shm", "/proc"] {
            let directory = std::fs::File::open(path).unwrap();
            assert_eq!(network_kind(directory.as_fd()).unwrap(), None, "{path}");
        }
    }
}
