// Block softmax in base 2 for G query heads in step: scores in, p = 2^(s - m) out, m the running
// maximum rounded up to a whole number.
//
// Scores and p are kept for two blocks each. A block's p is made in one pass behind its last score:
// first m_new - m_old goes through the subtracter, then the scores.
`default_nettype none
module softmax #(parameter G = 1, parameter LB = 7) (
    input  wire             clk,
    input  wire             rst,
    input  wire             start,          // of a job: forget the maximum
    input  wire             length_valid,   // the length of the oldest block with scores is known
    input  wire [LB:0]      length,
    output wire             length_taken,
    input  wire             score_valid,    // one token's scores, in order
    input  wire [32*G-1:0]  score,
    output reg              p_done,         // pulse: all p of one block are there
    output wire             seen,           // m is a number
    output wire [9*G-1:0]   shift,          // m_new - m_old of that block, at most 511
    output wire [32*G-1:0]  maximum,        // fp32
    input  wire             p_bank,
    input  wire [LB-1:0]    p_row,
    output wire [32*G-1:0]  p               // one cycle later
);
    localparam ROWS = 2 << LB;
    // Scores of a block come in.
    reg write_bank;
    reg [LB:0] written;
    wire last = length_valid && written == length;
    reg waiting, have_m, busy, first_block;
    reg [LB:0] waiting_length;
    assign length_taken = last;
    wire begin_pass = waiting && !busy;
    // A pass over a block: -1 (the maxima), then its rows.
    reg reading, read_bank, of_maxima;
    reg [LB:0] read_row, read_length;
    reg sub_valid, sub_maxima;
    wire [G-1:0] difference_valid, power_valid;
    reg wait_maxima;
    reg p_write_bank;
    reg [LB:0] p_written;
    assign seen = have_m;
    wire is_maxima = difference_valid[0] && wait_maxima;
    wire p_last = power_valid[0] && p_written + 1'b1 == read_length;
    always @(posedge clk) begin
        sub_valid <= reading;
        sub_maxima <= reading && of_maxima;
        p_done <= 0;
        if (rst || start) begin
            write_bank <= 0;
            written <= 0;
            waiting <= 0;
            busy <= 0;
            have_m <= 0;
            reading <= 0;
            read_bank <= 0;
            sub_valid <= 0;
            wait_maxima <= 0;
            p_write_bank <= 0;
            p_written <= 0;
        end else begin
            if (last) begin
                written <= score_valid ? 1 : 0;
                write_bank <= !write_bank;
                waiting <= 1;
                waiting_length <= length;
            end else if (score_valid) written <= written + 1'b1;
            if (begin_pass) begin
                waiting <= last;
                busy <= 1;
                reading <= 1;
                of_maxima <= 1;
                wait_maxima <= 1;
                read_row <= 0;
                read_length <= waiting_length;
                have_m <= 1;
                first_block <= !have_m;
            end else if (reading) begin
                of_maxima <= 0;
                if (!of_maxima) begin
                    read_row <= read_row + 1'b1;
                    if (read_row + 1'b1 == read_length) begin
                        reading <= 0;
                        read_bank <= !read_bank;
                    end
                end
            end
            if (is_maxima) wait_maxima <= 0;
            if (power_valid[0]) begin
                p_written <= p_written + 1'b1;
                if (p_last) begin
                    p_written <= 0;
                    p_write_bank <= !p_write_bank;
                    p_done <= 1;
                    busy <= 0;
                end
            end
        end
    end
    wire write_to = last ? !write_bank : write_bank;
    wire [LB-1:0] write_row = last ? {LB{1'b0}} : written[LB-1:0];

    genvar g;
    generate for (g = 0; g < G; g = g + 1) begin : head
        function automatic [31:0] order(input [31:0] x);
            order = x[31] ? ~x : {1'b1, x[30:0]};
        endfunction
        reg [31:0] scores [0:ROWS-1];
        reg [31:0] powers [0:ROWS-1];
        wire [31:0] s = score[32*g +: 32];
        reg [31:0] block_max, waiting_max, m, m_old, stored, read_p;
        reg [8:0] move;
        wire [31:0] up, m_next, difference, power;
        ceil_single ceiling(.x(waiting_max), .y(up));
        assign m_next = (have_m && order(m) >= order(up)) ? m : up;
        wire [31:0] sub_a = sub_maxima ? m : stored;
        wire [31:0] sub_b = sub_maxima ? m_old : m;
        // A whole number of at least 0 as an integer.
        wire [7:0] e = difference[30:23];
        wire [8:0] whole = e < 127 ? 9'd0 : e >= 136 ? 9'd511
                         : 9'({1'b1, difference[22:15]} >> (8'd135 - e));
        always @(posedge clk) begin
            if (score_valid) begin
                scores[{write_to, write_row}] <= s;
                if (write_row == 0 || order(s) > order(block_max)) block_max <= s;
            end
            if (last) waiting_max <= block_max;
            if (begin_pass) begin
                m <= m_next;
                m_old <= m;
            end
            stored <= scores[{read_bank, read_row[LB-1:0]}];
            if (is_maxima) move <= first_block ? 9'd0 : whole;
            if (power_valid[g]) powers[{p_write_bank, p_written[LB-1:0]}] <= power;
            read_p <= powers[{p_bank, p_row}];
        end
        assign shift[9*g +: 9] = move;
        assign maximum[32*g +: 32] = m;
        assign p[32*g +: 32] = read_p;
        add_single subtract(.clk(clk), .rst(rst || start), .in_valid(sub_valid), .a(sub_a),
            .b({~sub_b[31], sub_b[30:0]}), .out_valid(difference_valid[g]), .y(difference));
        zkf_exp2 #(.WEXP(8), .WMAN(24), .STAGE_REDUCE(1), .STAGE_PRODUCT(1), .STAGE_PRODUCT_SQUARE(1),
            .STAGE_PRODUCT_CHAIN(1), .STAGE_PACK(1), .STAGE_OUTPUT(1))
            exponential(.clk(clk), .rst(rst || start), .in_valid(difference_valid[g] && !wait_maxima),
                .x(difference), .out_valid(power_valid[g]), .y(power));
    end endgenerate
endmodule
`default_nettype wire
