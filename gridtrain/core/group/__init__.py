"""What both sides say of a group: events and effects of a member, rank layout, invitations."""
